"""The decoder of Llama and Qwen3: attention and a gated MLP, each after a norm.

*Decision*: the parts of a layer before and after its attention can be compiled, and are not by
default. *Because*: a pass of few rows reads weights for nearly all of its time, in matrix products
that a compiler leaves to the same library. Of a layer of Llama-3.1-8B in bfloat16 they are 436 MB,
130 us at 3.35 TB/s. What is fused are about ten small kernels, an estimated 20 us of launches in a
graph; nothing of this has been measured on a GPU. *Not chosen*: compiled by default, which takes
time at start-up. *Revisit when* ``make gpu-check`` shows ``verify_1_compiled_over_eager``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from ssd.engine.config import ModelConfig
from ssd.engine.layers.embedding import Embedding
from ssd.engine.layers.linear import Linear
from ssd.engine.layers.norm import RMSNorm
from ssd.engine.layers.rope import RotaryTable, rotate
from ssd.engine.models.decoder_weights import DecoderWeights, LayerWeights
from ssd.engine.parallel.group import ALONE, Group

MAX_SHAPES = 256
"""Limit of compilations; torch allows only 8 by default, and raises beyond."""
Function = TypeVar("Function", bound=Callable[..., Any])


class Attends(Protocol):
    """The attention of one pass over the KV cache."""

    def attend(
        self, layer: int, queries_RHE: Tensor, keys_RGE: Tensor, values_RGE: Tensor
    ) -> Tensor:
        """Store new keys and values; return the attention output, [R, H*E]."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer. Query, key and value share a product, as do gate and up."""

    input_norm: RMSNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class Decoder:
    """A dense decoder over token ids, or a rank's part of one; independent of the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        group: Group = ALONE,
        first_id: int = 0,
        *,
        is_compiled: bool = False,
    ) -> None:
        """Construct.

        Args:
            config: shape of this rank's part.
            weights: of this rank's part.
            group: the ranks that have the other parts.
            first_id: first token id of this rank's embedding and head.
            is_compiled: whether the parts of a layer around its attention are compiled for each
                number of rows.
        """
        self.config = config
        self._group = group
        self._embedding_VD = weights.embedding_VD
        self._embedding = Embedding(weights.embedding_VD, group, first_id)
        self._layers = [_layer(layer, config.rms_norm_eps) for layer in weights.layers]
        self._before, self._after = before_attention, after_attention
        if is_compiled:
            device = weights.embedding_VD.device
            self._before = _compiled(before_attention, device)
            self._after = _compiled(after_attention, device)
        self._norm = RMSNorm(weights.norm_D, config.rms_norm_eps)
        head_VD = weights.head_VD
        self._head = Linear(weights.embedding_VD if head_VD is None else head_VD)
        self.rotary: RotaryTable | None = None

    def prepare(self, max_len: int) -> None:
        """Compute the rotary table for positions below ``max_len``; once, before ``forward``."""
        embedding_VD = self._embedding_VD
        self.rotary = RotaryTable(
            self.config, max_len, embedding_VD.dtype, str(embedding_VD.device)
        )

    def forward(self, tokens_R: Tensor, positions_R: Tensor, attention: Attends) -> Tensor:
        """Run all layers.

        Args:
            tokens_R: int64 ids.
            positions_R: int64 absolute positions, below the ``max_len`` of ``prepare``.
            attention: stores keys and values and attends.

        Returns:
            Hidden states before the last norm, [R, D].
        """
        assert self.rotary is not None
        rotation = self.rotary.gather(positions_R)
        hidden_RD, added_RD = self._embedding(tokens_R), None
        for index, layer in enumerate(self._layers):
            hidden_RD, queries_RHE, keys_RGE, values_RGE = self._before(
                layer, self.config, hidden_RD, added_RD, rotation
            )
            seen_RX = attention.attend(index, queries_RHE, keys_RGE, values_RGE)
            seen_RD = self._group.add(layer.output(seen_RX))
            hidden_RD, part_RD = self._after(layer, hidden_RD, seen_RD)
            added_RD = self._group.add(part_RD)
        return hidden_RD if added_RD is None else hidden_RD + added_RD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return fp32 logits [R, V] of hidden states, of this rank's token ids."""
        return self._head(self._norm(hidden_RD)).float()


def before_attention(
    layer: DecoderLayer,
    config: ModelConfig,
    hidden_RD: Tensor,
    added_RD: Tensor | None,
    rotation: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add what the layer before adds; return the sum, rotated queries and keys, and values."""
    if added_RD is not None:
        hidden_RD = hidden_RD + added_RD
    num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
    fused_RD = layer.qkv(layer.input_norm(hidden_RD))
    fused_RHE = fused_RD.view(fused_RD.shape[0], -1, config.head_size)
    heads_RHE = fused_RHE[:, :num_rotated]
    if layer.query_norm is not None and layer.key_norm is not None:
        heads_RHE = torch.cat(
            (layer.query_norm(heads_RHE[:, :num_heads]), layer.key_norm(heads_RHE[:, num_heads:])),
            dim=1,
        )
    rotated_RHE = rotate(heads_RHE, *rotation)
    return (
        hidden_RD,
        rotated_RHE[:, :num_heads],
        rotated_RHE[:, num_heads:],
        fused_RHE[:, num_rotated:],
    )


def after_attention(
    layer: DecoderLayer, hidden_RD: Tensor, seen_RD: Tensor
) -> tuple[Tensor, Tensor]:
    """Add what the attention adds; return the sum, and this rank's part of what the MLP adds."""
    hidden_RD = hidden_RD + seen_RD
    gate_RI, up_RI = layer.gate_up(layer.mlp_norm(hidden_RD)).chunk(2, dim=-1)
    return hidden_RD, layer.down(functional.silu(gate_RI) * up_RI)


def _compiled(function: Function, device: torch.device) -> Function:
    """Fuse the small kernels of a function; without CUDA, only the compiler's first half runs."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(  # type: ignore[call-overload] # its types lack recompile_limit
        function, dynamic=False, fullgraph=True, backend=backend, recompile_limit=MAX_SHAPES
    )
    return cast("Function", compiled)


def _layer(weights: LayerWeights, epsilon: float) -> DecoderLayer:
    query_E, key_E = weights.query_norm_E, weights.key_norm_E
    return DecoderLayer(
        input_norm=RMSNorm(weights.input_norm_D, epsilon),
        qkv=Linear(weights.qkv_OD),
        query_norm=None if query_E is None else RMSNorm(query_E, epsilon),
        key_norm=None if key_E is None else RMSNorm(key_E, epsilon),
        output=Linear(weights.output_DO),
        mlp_norm=RMSNorm(weights.mlp_norm_D, epsilon),
        gate_up=Linear(weights.gate_up_ID),
        down=Linear(weights.down_DI),
    )
