"""Checkpoints in safetensors: found, checked against what the model needs, read one by one."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ssd.errors import WeightsError


class Checkpoint:
    """The tensors of a model folder, memory-mapped.

    Raises:
        WeightsError: no weights, a truncated file, or an index that names a missing one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = _locate(folder)
        self._handles = {path: _open(path) for path in set(self._file_of.values())}

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored: frozenset[str]) -> None:
        """Compare names and shapes with what a model needs.

        Raises:
            WeightsError: naming the missing, surplus or misshapen tensor and its file.
        """
        for name in shapes:
            if name not in self._file_of:
                raise WeightsError(f"{self._folder}: tensor {name} is missing")
        for name, path in self._file_of.items():
            if name not in shapes:
                if name in ignored:
                    continue
                raise WeightsError(f"{path}: tensor {name} belongs to no layer of this model")
            found = tuple(self._handles[path].get_slice(name).get_shape())
            if found != shapes[name]:
                raise WeightsError(
                    f"{path}: tensor {name} has shape {list(found)}, not {list(shapes[name])}"
                )

    def read(self, name: str) -> Tensor:
        """Return one tensor, as stored."""
        tensor: Tensor = self._handles[self._file_of[name]].get_tensor(name)
        return tensor


class TensorReader:
    """Hands out a checkpoint's tensors in the engine's dtype and says how far it is."""

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

    def __call__(self, *names: str) -> Tensor:
        """Return one tensor, or several stacked along the first dimension."""
        parts = [self._checkpoint.read(name).to(self._dtype) for name in names]
        self._num_read += len(names)
        self.num_parameters += sum(part.numel() for part in parts)
        self._on_progress(min(1.0, self._num_read / self._num_tensors))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.to(self._device)


def _locate(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise WeightsError(f"{index}: not a checkpoint index: {error}") from error
        return {name: folder / file for name, file in names.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: no *.safetensors file in this folder")
    located: dict[str, Path] = {}
    for path in files:
        located.update(dict.fromkeys(_open(path).keys(), path))
    return located


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: named by the index, but not there") from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: truncated or not safetensors: {error}") from error
