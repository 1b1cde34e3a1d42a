"""Checkpoints in safetensors: find the files, check names and shapes, read the tensors."""

import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ssd.engine.checkpoint_format import missing_weights
from ssd.engine.parallel.shard import Part
from ssd.errors import WeightsError

STORED_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Other dtypes are quantised, and would be read as wrong numbers without an error."""

_LENGTH_BYTES = 8
"""At the start of a file of safetensors: the length of its header."""


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class _TensorFile(Protocol):
    """The used methods of ``safetensors.safe_open``, which has no type annotations."""

    def keys(self) -> Iterable[str]: ...
    def get_slice(self, name: str) -> _Slice: ...


class _MappedFile:
    """The tensors of a file of safetensors, as views of its pages.

    The file has been checked, so its header is valid.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            num_header = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            self._header = json.loads(file.read(num_header))
            # Torch warns about memory that cannot be written.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._first_byte = _LENGTH_BYTES + num_header

    def view(self, names: Sequence[str]) -> Tensor | None:
        """Return tensors stacked along the first dimension; None if they do not lie in this order.

        All have the shape of the first one, but for the first dimension.
        """
        entries = [self._header[name] for name in names]
        kind, (first, end) = entries[0]["dtype"], entries[0]["data_offsets"]
        for entry in entries[1:]:
            if entry["dtype"] != kind or entry["data_offsets"][0] != end:
                return None
            end = entry["data_offsets"][1]
        dtype, (_, *rest) = STORED_DTYPES[kind], entries[0]["shape"]
        values = torch.frombuffer(
            self._memory,
            dtype=dtype,
            count=(end - first) // dtype.itemsize,
            offset=self._first_byte + first,
        )
        return values.view(-1, *rest)

    def free_pages(self) -> None:
        """Free the pages in memory; a page is read from the file again when it is used."""
        self._memory.madvise(mmap.MADV_DONTNEED)


class Checkpoint:
    """The tensors of a model folder, memory-mapped.

    Raises:
        WeightsError: no weights, a truncated file, or a file of the index that does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: Mapping[str, Part] = {}
        self._file_of = _locate(folder)
        self._handles = {path: _open(path) for path in set(self._file_of.values())}
        self._mapped: dict[Path, _MappedFile] = {}

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored: frozenset[str]) -> None:
        """Compare names and shapes with what a model needs.

        Raises:
            WeightsError: names the tensor that is missing, unknown or of wrong shape.
        """
        for name in shapes:
            if name not in self._file_of:
                raise WeightsError(f"{self._folder}: tensor {name} is missing")
        for name, path in self._file_of.items():
            if name not in shapes:
                if name in ignored:
                    continue
                raise WeightsError(f"{path}: tensor {name} belongs to no layer of this model")
            header = self._slice(name)
            shape = tuple(header.get_shape())
            if shape != shapes[name]:
                raise WeightsError(
                    f"{path}: tensor {name} has shape {list(shape)}, not {list(shapes[name])}"
                )
            if header.get_dtype() not in STORED_DTYPES:
                raise WeightsError(
                    f"{path}: tensor {name} is stored as {header.get_dtype()}, and quantised "
                    "checkpoints are not supported"
                )

    def check_tied(self, name: str, other: str) -> None:
        """Compare a stored tensor that is not read with the tensor that replaces it.

        With ``select``, compare only the selected parts.

        Raises:
            WeightsError: they differ, so this is another model.
        """
        if name not in self._file_of:
            return
        is_readable = self._slice(name).get_dtype() in STORED_DTYPES
        expected = self.read(other)
        if not is_readable or not torch.equal(self.read(name).to(expected.dtype), expected):
            raise WeightsError(
                f"{self._file_of[name]}: tensor {name} is not equal to {other}, but config.json "
                f"has tie_word_embeddings true; set it to false there, or remove {name}"
            )

    def dtypes(self, ignored: frozenset[str]) -> set[str]:
        """Return the dtypes of the tensors that are read, by their names in the files."""
        return {self._slice(name).get_dtype() for name in self._file_of.keys() - ignored}

    def select(self, parts: Mapping[str, Part]) -> None:
        """Read only these parts of these tensors from now on."""
        self._parts = parts

    def file_of(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self._file_of[name]

    def read(self, *names: str) -> Tensor:
        """Return one tensor, or several stacked along the first dimension, in their stored dtype.

        Of a tensor of ``select``, it returns the selected part. The result is a view of the file if
        the tensors are whole and lie behind one another; it must not be written.
        """
        paths = {self._file_of[name] for name in names}
        if len(paths) == 1 and not any(name in self._parts for name in names):
            view = self._map(paths.pop()).view(names)
            if view is not None:
                return view
        if len(names) > 1:
            return torch.cat([self.read(name) for name in names])
        return self._slice(names[0])[self._parts[names[0]].index]

    def free_pages(self) -> None:
        """Free the memory of the tensors that are views; what is used later is read again."""
        for file in self._mapped.values():
            file.free_pages()

    def _map(self, path: Path) -> _MappedFile:
        if path not in self._mapped:
            try:
                self._mapped[path] = _MappedFile(path)
            except OSError as error:
                raise WeightsError(f"{path}: cannot be mapped into memory: {error}") from error
        return self._mapped[path]

    def num_values(self, name: str) -> int:
        """Return the number of values of the whole tensor."""
        return math.prod(self._slice(name).get_shape())

    def _slice(self, name: str) -> _Slice:
        path = self._file_of[name]
        try:
            return self._handles[path].get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{path}: the index places tensor {name} here: {error}") from error


def is_bfloat16(folder: Path, ignored: frozenset[str]) -> bool:
    """Return whether all tensors of a checkpoint that are read are stored in bfloat16.

    Raises:
        WeightsError: as ``Checkpoint``.
    """
    return Checkpoint(folder).dtypes(ignored) == {"BF16"}


class TensorReader:
    """Returns the tensors of a checkpoint in the engine's dtype, and reports the progress."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str,
        num_tensors: int,
        on_progress: Callable[[float], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._num_tensors = num_tensors
        self._num_read = 0
        self._on_progress = on_progress
        self.num_parameters = 0

    def __call__(
        self, *names: str, may_contain_nan: bool = False, is_copied: bool = False
    ) -> Tensor:
        """Return one tensor, or several stacked along the first dimension.

        Args:
            names: of the checkpoint.
            may_contain_nan: for a tensor of which each token reads one row, so that other tokens
                are not affected.
            is_copied: for a tensor that passes read, which must not change with the file.

        Raises:
            WeightsError: a tensor contains NaN or infinity.
        """
        tensor = self._checkpoint.read(*names).to(self._dtype, copy=is_copied)
        if not may_contain_nan and not _is_finite(tensor):
            self._raise_for_values(names)
        self._num_read += len(names)
        self.num_parameters += sum(map(self._checkpoint.num_values, names))
        self._on_progress(min(1.0, self._num_read / self._num_tensors))
        return tensor.to(self._device)

    def free_pages(self) -> None:
        """See ``Checkpoint.free_pages``."""
        self._checkpoint.free_pages()

    def _raise_for_values(self, names: Iterable[str]) -> NoReturn:
        parts = {name: self._checkpoint.read(name).to(self._dtype) for name in names}
        invalid = next(name for name, part in parts.items() if not _is_finite(part))
        path = self._checkpoint.file_of(invalid)
        raise WeightsError(f"{path}: tensor {invalid} contains NaN or infinity")


def _is_finite(tensor: Tensor) -> bool:
    # Minimum and maximum are NaN if any value is: one pass without a copy.
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, sorted by name.

    Raises:
        WeightsError: there are none, or the index is invalid.
    """
    return sorted(set(_locate(folder).values()))


def _locate(folder: Path) -> dict[str, Path]:
    """Find the file of each tensor: in model.safetensors, by the index, or in all files.

    An index beside model.safetensors is left over from an earlier model, as for transformers.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file() and not single.is_file():
        try:
            names = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{index}: not a checkpoint index: {error}") from error
        return {name: folder / file for name, file in names.items()}
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: {missing_weights(folder)}")
    located: dict[str, Path] = {}
    for path in files:
        located.update(dict.fromkeys(_open(path).keys(), path))
    return located


def _open(path: Path) -> _TensorFile:
    try:
        handle: _TensorFile = safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: named by the index, but missing") from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: truncated or not safetensors: {error}; download it again"
        ) from error
    return handle
