"""The decoder of Llama and Qwen3: attention and a gated MLP, each after a norm.

*Decision*: the parts of a layer before and after its attention can be compiled, and are not by
default. *Because*: a pass of few rows reads weights for nearly all of its time, in matrix products
that a compiler leaves to the same library. Of a layer of Llama-3.1-8B in bfloat16 they are 436 MB,
130 us at 3.35 TB/s. What is fused are about ten small kernels, an estimated 20 us of launches in a
graph; nothing of this has been measured on a GPU. *Not chosen*: compiled by default, which takes
time at start-up. *Revisit when* ``make gpu-check`` shows ``verify_1_compiled_over_eager``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ssd.engine.compiler import compiled_by_shape
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.rope import RotaryTable, rotate
from ssd.engine.models.weights import DecoderWeights, LayerWeights, open_weights
from ssd.engine.parallel.group import ALONE, Group
from ssd.engine.parallel.shard import ids_of, model_of
from ssd.engine.precision import DTYPES


class Attends(Protocol):
    """The attention of one pass over the KV cache."""

    def attend(
        self, layer: int, queries_RHE: Tensor, keys_RGE: Tensor, values_RGE: Tensor
    ) -> Tensor:
        """Store new keys and values; return the attention output, [R, H*E]."""


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
        """Construct; shape and weights describe this rank's part.

        ``first_id`` is the first token id of this rank's embedding and head. With ``is_compiled``,
        the parts of a layer around its attention are compiled for each number of rows.
        """
        self.config = config
        self._group = group
        self._first_id = first_id
        self._embedding_VD = weights.embedding_VD
        self._layers = list(weights.layers)
        self._before, self._after = before_attention, after_attention
        if is_compiled:
            # Without CUDA, only the compiler's first half runs.
            backend = "inductor" if weights.embedding_VD.is_cuda else "aot_eager"
            self._before = compiled_by_shape(before_attention, backend)
            self._after = compiled_by_shape(after_attention, backend)
        self._norm_D = weights.norm_D
        self._head_VD = weights.embedding_VD if weights.head_VD is None else weights.head_VD
        self.rotary: RotaryTable | None = None

    def prepare(self, max_len: int) -> None:
        """Compute the rotary table for positions below ``max_len``; once, before ``forward``."""
        self.rotary = RotaryTable(self.config, max_len, self._embedding_VD)

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
        hidden_RD, added_RD = self._embed(tokens_R), None
        for index, layer in enumerate(self._layers):
            hidden_RD, queries_RHE, keys_RGE, values_RGE = self._before(
                layer, self.config, hidden_RD, added_RD, rotation
            )
            seen_RX = attention.attend(index, queries_RHE, keys_RGE, values_RGE)
            seen_RD = self._group.add(functional.linear(seen_RX, layer.output_DO))
            hidden_RD, part_RD = self._after(layer, self.config, hidden_RD, seen_RD)
            added_RD = self._group.add(part_RD)
        return hidden_RD if added_RD is None else hidden_RD + added_RD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return fp32 logits [R, V] of hidden states, of this rank's token ids."""
        normed_RD = _rms_norm(hidden_RD, self._norm_D, self.config)
        return functional.linear(normed_RD, self._head_VD).float()

    def _embed(self, tokens_R: Tensor) -> Tensor:
        """Return the rows of token ids, [R, D]; a rank adds zeros for the ids of others."""
        if self._group.shard.is_whole:
            return functional.embedding(tokens_R, self._embedding_VD)
        row_R = tokens_R - self._first_id
        is_own_R = (row_R >= 0) & (row_R < len(self._embedding_VD))
        own_RD = functional.embedding(row_R.where(is_own_R, 0), self._embedding_VD)
        # ``where`` and not a product: the weight may contain NaN.
        return self._group.add(torch.where(is_own_R[:, None], own_RD, 0.0))


def before_attention(
    layer: LayerWeights,
    config: ModelConfig,
    hidden_RD: Tensor,
    added_RD: Tensor | None,
    rotation: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the part of a layer before its attention.

    Args:
        layer: weights.
        config: shape of this rank's part.
        hidden_RD: hidden states of the layer before, without ``added_RD``.
        added_RD: what the MLP of the layer before adds; None in the first layer.
        rotation: cosines and signed sines of the rows, [R, 1, E] each.

    Returns:
        The hidden states of this layer [R, D], rotated queries [R, H, E], rotated keys and values
        [R, G, E] each.
    """
    if added_RD is not None:
        hidden_RD = hidden_RD + added_RD
    num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
    fused_RD = functional.linear(_rms_norm(hidden_RD, layer.input_norm_D, config), layer.qkv_OD)
    fused_RHE = fused_RD.view(fused_RD.shape[0], -1, config.head_size)
    heads_RHE = fused_RHE[:, :num_rotated]
    if layer.query_norm_E is not None and layer.key_norm_E is not None:
        queries_RHE = _rms_norm(heads_RHE[:, :num_heads], layer.query_norm_E, config)
        keys_RGE = _rms_norm(heads_RHE[:, num_heads:], layer.key_norm_E, config)
        heads_RHE = torch.cat((queries_RHE, keys_RGE), dim=1)
    rotated_RHE = rotate(heads_RHE, *rotation)
    return (
        hidden_RD,
        rotated_RHE[:, :num_heads],
        rotated_RHE[:, num_heads:],
        fused_RHE[:, num_rotated:],
    )


def after_attention(
    layer: LayerWeights, config: ModelConfig, hidden_RD: Tensor, seen_RD: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the part of a layer after its attention.

    Args:
        layer: weights.
        config: shape of this rank's part.
        hidden_RD: as ``before_attention`` returns them.
        seen_RD: what the attention of all ranks adds.

    Returns:
        The sum of both, and this rank's part of what the MLP adds, [R, D] each.
    """
    hidden_RD = hidden_RD + seen_RD
    normed_RD = _rms_norm(hidden_RD, layer.mlp_norm_D, config)
    gate_RI, up_RI = functional.linear(normed_RD, layer.gate_up_ID).chunk(2, dim=-1)
    return hidden_RD, functional.linear(functional.silu(gate_RI) * up_RI, layer.down_DI)


def _rms_norm(input_XD: Tensor, weight_D: Tensor, config: ModelConfig) -> Tensor:
    return functional.rms_norm(input_XD, weight_D.shape, weight_D, config.rms_norm_eps)


def open_decoder(
    folder: Path,
    config: ModelConfig,
    engine: EngineConfig,
    on_progress: Callable[[float], None],
    group: Group = ALONE,
) -> Decoder:
    """Read a folder as a decoder of torch, or a rank's part of one.

    Raises:
        WeightsError: as ``open_weights``.
    """
    dtype, shard = DTYPES[engine.dtype], group.shard
    weights = open_weights(folder, config, dtype, engine.device, on_progress, shard)
    return Decoder(
        model_of(config, shard),
        weights,
        group,
        ids_of(config, shard).start,
        is_compiled=engine.compile_layers,
    )
