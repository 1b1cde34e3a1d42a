"""Checkpoints in safetensors, and their tensors as the weights of a decoder.

Letter: I, both halves of gate and up.
"""

import json
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from ssd.engine.config import ModelConfig
from ssd.engine.models import llama
from ssd.engine.models.headers import NAMES_OF_DTYPES, check_headers, read_headers
from ssd.engine.parallel.shard import WHOLE, Part, Shard
from ssd.engine.sizes import has_head_norms
from ssd.errors import WeightsError

STORED_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, in_torch) for name, in_torch in NAMES_OF_DTYPES.items()
}
_LENGTH_BYTES = 8
"""At the start of a file of safetensors: the length of its header."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Query, key and value are stacked, as are gate and up."""

    input_norm_D: Tensor
    qkv_OD: Tensor
    query_norm_E: Tensor | None
    """Norm of each query head; None without such norms, as for the keys."""
    key_norm_E: Tensor | None
    output_DO: Tensor
    mlp_norm_D: Tensor
    gate_up_ID: Tensor
    down_DI: Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. Layers are read one by one, so that an engine can convert them in turn."""

    embedding_VD: Tensor
    layers: Iterable[LayerWeights]
    norm_D: Tensor
    head_VD: Tensor | None
    """None if it is the embedding."""
    free_pages: Callable[[], None]
    """Frees the memory of the tensors that are views of the checkpoint. What is used later is read
    from its files again."""


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
    """The tensors of a model folder, memory-mapped; only a part of those in ``parts``.

    Raises:
        WeightsError: no weights, a truncated file, or a file of the index that does not exist.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Part] = MappingProxyType({})) -> None:
        self.headers = read_headers(folder)
        """Of each tensor, by name."""
        self._parts = parts
        self._mapped: dict[Path, _MappedFile] = {}

    def check_tied(self, name: str, other: str) -> None:
        """Compare a stored tensor that is not read with the tensor that replaces it, in parts.

        Raises:
            WeightsError: they differ, so this is another model.
        """
        if name not in self.headers:
            return
        is_readable = self.headers[name].dtype in STORED_DTYPES
        expected = self.read(other)
        if not is_readable or not torch.equal(self.read(name).to(expected.dtype), expected):
            raise WeightsError(
                f"{self.file_of(name)}: tensor {name} is not equal to {other}, but config.json "
                f"has tie_word_embeddings true; set it to false there, or remove {name}"
            )

    def file_of(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self.headers[name].path

    def read(self, *names: str) -> Tensor:
        """Return one tensor, or several stacked along the first dimension, in their stored dtype.

        The result is a view of the file if the tensors are whole and lie behind one another; it
        must not be written.
        """
        paths = {self.file_of(name) for name in names}
        is_part = any(name in self._parts for name in names)
        view = self._map(paths.pop()).view(names) if len(paths) == 1 else None
        if view is None or (is_part and len(names) > 1):
            return torch.cat([self.read(name) for name in names])
        return view[self._parts[names[0]]].clone() if is_part else view

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
        self.free_pages = checkpoint.free_pages
        self._dtype = dtype
        self._device = device
        self._num_tensors = num_tensors
        self._num_read = 0
        self._on_progress = on_progress

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
        self._on_progress(min(1.0, self._num_read / self._num_tensors))
        return tensor.to(self._device)

    def _raise_for_values(self, names: Iterable[str]) -> NoReturn:
        parts = {name: self._checkpoint.read(name).to(self._dtype) for name in names}
        invalid = next(name for name, part in parts.items() if not _is_finite(part))
        path = self._checkpoint.file_of(invalid)
        raise WeightsError(f"{path}: tensor {invalid} contains NaN or infinity")


def open_checkpoint(folder: Path, config: ModelConfig, shard: Shard = WHOLE) -> Checkpoint:
    """Check the names and shapes of a folder's tensors, and the head of tied embeddings.

    ``config`` is the shape of the whole model. Only the parts of the rank are read.

    Raises:
        WeightsError: a missing, surplus, truncated, quantised or misshapen tensor, or a head that
            is not its tied embedding, by name and file.
    """
    checkpoint = Checkpoint(folder, llama.parts(config, shard))
    check_headers(folder, checkpoint.headers, llama.shapes(config), llama.ignored(config))
    if config.tie_word_embeddings:
        checkpoint.check_tied(llama.HEAD, llama.EMBEDDING)
    return checkpoint


def open_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    on_progress: Callable[[float], None],
    shard: Shard = WHOLE,
) -> DecoderWeights:
    """Check a folder's tensors and begin to read them, or a rank's parts of them.

    ``config`` is the shape of the whole model. ``on_progress`` is called with 0..1.

    Raises:
        WeightsError: as ``open_checkpoint``, or a tensor with NaN or infinity. Iterating over the
            layers raises it too.
    """
    checkpoint = open_checkpoint(folder, config, shard)
    num_tensors = len(llama.shapes(config))
    reader = TensorReader(checkpoint, dtype, device, num_tensors, on_progress)
    return _decoder_weights(config, reader)


def _decoder_weights(config: ModelConfig, read: TensorReader) -> DecoderWeights:
    """Read a checkpoint's tensors; a layer's are read when the iterator reaches it."""
    is_tied = config.tie_word_embeddings
    return DecoderWeights(
        # Each token reads a row of it.
        embedding_VD=read(llama.EMBEDDING, may_contain_nan=not is_tied, is_copied=True),
        layers=(
            _layer(read, f"model.layers.{index}.", with_head_norms=has_head_norms(config))
            for index in range(config.num_layers)
        ),
        norm_D=read(llama.NORM),
        head_VD=None if is_tied else read(llama.HEAD),
        free_pages=read.free_pages,
    )


def _layer(read: TensorReader, prefix: str, *, with_head_norms: bool) -> LayerWeights:
    attention = prefix + "self_attn."
    return LayerWeights(
        input_norm_D=read(prefix + "input_layernorm.weight"),
        qkv_OD=read(*(f"{attention}{kind}_proj.weight" for kind in "qkv")),
        query_norm_E=read(attention + "q_norm.weight") if with_head_norms else None,
        key_norm_E=read(attention + "k_norm.weight") if with_head_norms else None,
        output_DO=read(attention + "o_proj.weight"),
        mlp_norm_D=read(prefix + "post_attention_layernorm.weight"),
        gate_up_ID=read(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"),
        down_DI=read(prefix + "mlp.down_proj.weight"),
    )


def _is_finite(tensor: Tensor) -> bool:
    # Minimum and maximum are NaN if any value is: one pass without a copy.
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
