"""Checkpoints in safetensors: find the files, check names and shapes, read the tensors."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ssd.engine.checkpoint_format import missing_weights
from ssd.engine.parallel.shard import Part
from ssd.errors import WeightsError

STORED_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
"""Other dtypes are quantised, and would be read as wrong numbers without an error."""


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class _TensorFile(Protocol):
    """The used methods of ``safetensors.safe_open``, which has no type annotations."""

    def keys(self) -> Iterable[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


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
            found = tuple(header.get_shape())
            if found != shapes[name]:
                raise WeightsError(
                    f"{path}: tensor {name} has shape {list(found)}, not {list(shapes[name])}"
                )
            if header.get_dtype() not in STORED_DTYPES:
                raise WeightsError(
                    f"{path}: tensor {name} is stored as {header.get_dtype()}, and quantised "
                    "checkpoints are not supported"
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

    def read(self, name: str) -> Tensor:
        """Return one tensor, or the selected part of it, in its stored dtype."""
        if name in self._parts:
            return self._slice(name)[self._parts[name].index]
        return self._handles[self._file_of[name]].get_tensor(name)

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

    def __call__(self, *names: str, may_contain_nan: bool = False) -> Tensor:
        """Return one tensor, or several stacked along the first dimension.

        Args:
            names: of the checkpoint.
            may_contain_nan: for a tensor of which each token reads one row, so that other tokens
                are not affected.

        Raises:
            WeightsError: a tensor contains NaN or infinity.
        """
        parts = [self._checkpoint.read(name).to(self._dtype) for name in names]
        if not may_contain_nan:
            for name, part in zip(names, parts, strict=True):
                self._check_finite(name, part)
        self._num_read += len(names)
        self.num_parameters += sum(map(self._checkpoint.num_values, names))
        self._on_progress(min(1.0, self._num_read / self._num_tensors))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.to(self._device)

    def _check_finite(self, name: str, part: Tensor) -> None:
        # Minimum and maximum are NaN if any value is: one pass without a copy.
        if not bool(torch.stack(torch.aminmax(part)).isfinite().all()):
            path = self._checkpoint.file_of(name)
            raise WeightsError(f"{path}: tensor {name} contains NaN or infinity")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, sorted by name.

    Raises:
        WeightsError: there are none, or the index is invalid.
    """
    return sorted(set(_locate(folder).values()))


def _locate(folder: Path) -> dict[str, Path]:
    """Find the file of each tensor: by the index, in model.safetensors, or in all files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{index}: not a checkpoint index: {error}") from error
        return {name: folder / file for name, file in names.items()}
    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
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
