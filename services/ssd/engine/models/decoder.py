"""The decoder of Llama and Qwen3: attention and a gated MLP, each after a norm.

*Decision*: layers are not compiled with ``torch.compile``; ``static`` captures their operations as
they are. *Because*: a pass of few rows reads weights for nearly all of its time, in matrix products
that a compiler leaves to the same library. Of a layer of Llama-3.1-8B in bfloat16 they are 436 MB,
130 us at 3.35 TB/s. What could be fused are about ten small kernels, an estimated 20 us of launches
in a graph; nothing of this has been measured on a GPU. *Not chosen*: an option, which adds a
compiler at start-up, one more source of other bits, and a setting that no one has measured.
*Revisit when* ``make gpu-check`` shows ``verify_1_over_weights`` above 1.25.
"""

from dataclasses import dataclass
from typing import Protocol

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

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linears of the layer."""
        return (self.qkv, self.output, self.gate_up, self.down)


class Decoder:
    """A dense decoder over token ids, or a rank's part of one; independent of the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        group: Group = ALONE,
        first_id: int = 0,
    ) -> None:
        """Construct.

        Args:
            config: shape of this rank's part.
            weights: of this rank's part.
            group: the ranks that have the other parts.
            first_id: first token id of this rank's embedding and head.
        """
        self.config = config
        self._group = group
        self._embedding_VD = weights.embedding_VD
        self._embedding = Embedding(weights.embedding_VD, group, first_id)
        self._layers = [_layer(layer, config.rms_norm_eps) for layer in weights.layers]
        self._norm = RMSNorm(weights.norm_D, config.rms_norm_eps)
        head_VD = weights.head_VD
        self._head = Linear(weights.embedding_VD if head_VD is None else head_VD)
        linears = [each for layer in self._layers for each in layer.linears]
        self.is_packed = all(linear.is_packed for linear in (*linears, self._head))
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
        config = self.config
        rotation = self.rotary.gather(positions_R)
        num_rotated = config.num_heads + config.num_kv_heads
        hidden_RD = self._embedding(tokens_R)
        for index, layer in enumerate(self._layers):
            fused_RHE = layer.qkv(layer.input_norm(hidden_RD)).view(
                len(tokens_R), -1, config.head_size
            )
            queries_RHE, keys_RGE = self._rotated(fused_RHE[:, :num_rotated], layer, rotation)
            seen_RX = attention.attend(index, queries_RHE, keys_RGE, fused_RHE[:, num_rotated:])
            hidden_RD = hidden_RD + self._group.add(layer.output(seen_RX))
            gate_RI, up_RI = layer.gate_up(layer.mlp_norm(hidden_RD)).chunk(2, dim=-1)
            hidden_RD = hidden_RD + self._group.add(layer.down(functional.silu(gate_RI) * up_RI))
        return hidden_RD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return fp32 logits [R, V] of hidden states, of this rank's token ids."""
        return self._head(self._norm(hidden_RD)).float()

    def _rotated(
        self, heads_RHE: Tensor, layer: DecoderLayer, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        num_heads = self.config.num_heads
        if layer.query_norm is not None and layer.key_norm is not None:
            heads_RHE = torch.cat(
                (
                    layer.query_norm(heads_RHE[:, :num_heads]),
                    layer.key_norm(heads_RHE[:, num_heads:]),
                ),
                dim=1,
            )
        rotated_RHE = rotate(heads_RHE, *rotation)
        return rotated_RHE[:, :num_heads], rotated_RHE[:, num_heads:]


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
