"""The weights of a decoder, for the engine that runs it. Letter: I, both halves of gate and up."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor


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
