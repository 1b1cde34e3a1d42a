"""Headers of checkpoints in safetensors: the files that count, and names, shapes and dtypes.

Imported without torch. No weights are read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ssd.engine.checkpoint_format import missing_weights
from ssd.errors import WeightsError

NAMES_OF_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Names in torch of the dtypes that are read. Others are quantised, and would be read as wrong
numbers without an error."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a checkpoint."""

    path: Path
    """File that contains it."""
    shape: tuple[int, ...]
    dtype: str
    """Name in the file."""

    @property
    def num_values(self) -> int:
        """Number of values of the whole tensor."""
        return math.prod(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, sorted by name.

    Raises:
        WeightsError: there are none, the index is invalid, or a file is missing or is none.
    """
    if (indexed := _index(folder)) is not None:
        indexed_files = sorted(set(indexed.values()))
        for path in indexed_files:
            if not _is_file(path):
                raise WeightsError(f"{path} is missing; {_INDEX} names it")
        return indexed_files
    single = folder / _SINGLE
    files = [single] if _is_file(single) else sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: {missing_weights(folder)}")
    for path in files:
        if not _is_file(path):
            raise WeightsError(f"{path} is not a file, or it is a link to one that is missing")
    return files


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a model folder by name: those of the index, or of all its files.

    Raises:
        WeightsError: no weights, a truncated file, or an index that names a file or a tensor that
            does not exist.
    """
    headers = {path: _headers_of(path) for path in weight_files(folder)}
    if (indexed := _index(folder)) is None:
        return {name: header for of_file in headers.values() for name, header in of_file.items()}
    for name, path in indexed.items():
        if name not in headers[path]:
            raise WeightsError(f"{path}: the index places tensor {name} here, but it is missing")
    return {name: headers[path][name] for name, path in indexed.items()}


def dtypes_of(folder: Path, ignored: frozenset[str]) -> set[str]:
    """Return the dtypes of the tensors that are read, by their names in the files.

    Raises:
        WeightsError: as ``read_headers``.
    """
    return {header.dtype for name, header in read_headers(folder).items() if name not in ignored}


def check_headers(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: frozenset[str],
) -> None:
    """Compare the tensors of a folder with those that a model needs.

    Raises:
        WeightsError: names the tensor that is missing, unknown, quantised or of wrong shape.
    """
    for name in shapes:
        if name not in headers:
            raise WeightsError(f"{folder}: tensor {name} is missing")
    for name, header in headers.items():
        if name not in shapes:
            if name in ignored:
                continue
            raise WeightsError(f"{header.path}: tensor {name} belongs to no layer of this model")
        if header.shape != shapes[name]:
            raise WeightsError(
                f"{header.path}: tensor {name} has shape {list(header.shape)}, "
                f"not {list(shapes[name])}"
            )
        if header.dtype not in NAMES_OF_DTYPES:
            raise WeightsError(
                f"{header.path}: tensor {name} is stored as {header.dtype}, and quantised "
                "checkpoints are not supported"
            )


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file or a link to one, as in folders of the hub's cache.

    The read of a named pipe would wait for a writer.
    """
    try:
        return path.is_file()
    except OSError:
        # For example, the name is too long.
        return False


def _index(folder: Path) -> dict[str, Path] | None:
    """Return the file of each tensor by the index; None without an index.

    An index beside model.safetensors is left over from an earlier model, as for transformers.
    """
    index = folder / _INDEX
    if not _is_file(index) or _is_file(folder / _SINGLE):
        return None
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = dict(names.items())
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: not a checkpoint index: {error}") from error
    for name, file in files.items():
        # A model is its folder: a path could name any file of this machine.
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise WeightsError(
                f"{index}: not a checkpoint index: the file of tensor {name} is {file!r}, which "
                "is no name of a file in this folder"
            )
    return {name: folder / file for name, file in files.items()}


def _headers_of(path: Path) -> dict[str, TensorHeader]:
    try:
        # The library compares the header with the size of the file.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - a handle
            return {
                name: TensorHeader(path, tuple(each.get_shape()), each.get_dtype())
                for name, each in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: truncated or not safetensors: {error}; download it again"
        ) from error
