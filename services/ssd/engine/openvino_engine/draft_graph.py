"""The graph of a draft's passes, and its inputs.

Each pass has Q new rows of each session. They see *stored* entries and the new rows themselves,
each under an additive mask. The graph returns the keys and values of the new rows.

Letters: Q rows of a session, U = Q x heads of a group, S stored entries, X keys and values of
layers.
"""

from dataclasses import dataclass

import numpy as np
import openvino
import torch
from openvino import Node, opset15
from torch import Tensor

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.decoder_weights import DecoderWeights
from ssd.engine.openvino_engine.decoder import Seen, build_decoder, compile_graph, graph_weights
from ssd.engine.openvino_engine.layers import (
    Rotation,
    finite_or_zero,
    ints,
    number,
    product,
    product_with_transposed,
    reshape,
)

MAX_COPIED_BYTES = 64 << 20
"""Weights that are worth a second copy: passes over larger ones take much longer than 1.2 ms."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Gathered entries, and which of them each row sees."""

    entries_XBGSE: Tensor
    mask_B1US: Tensor


class DraftGraph:
    """A compiled graph with its inputs. Step thread only; results are valid until the next pass."""

    def __init__(self, request: openvino.InferRequest, model: ModelConfig, max_len: int) -> None:
        self._request = request
        self._num_layers = model.num_layers
        self._last_position = max_len - 1
        self._inputs: dict[str, Tensor] = {}
        self._stored: Stored | None = None

    def see(
        self, stored: Stored, new_mask: Tensor, tokens_BQ: Tensor, num_logits: int | None = None
    ) -> None:
        """Set the inputs that the next passes share.

        All calls with one object ``stored`` must have equal other arguments: only the first has an
        effect.

        Args:
            stored: the stored entries; their owner may change them between the passes.
            new_mask: additive mask of the new rows, [1, 1, U, Q].
            tokens_BQ: tokens of the shape of the passes.
            num_logits: rows that need logits; None: all.
        """
        if stored is self._stored:
            return
        self._stored = stored
        rows = tokens_BQ.numel()
        self._inputs = {
            "tokens": torch.empty(tokens_BQ.shape, dtype=torch.int32),
            "positions": torch.empty(tokens_BQ.shape, dtype=torch.int32),
            "shape": torch.tensor(tokens_BQ.shape),
            "logit_rows": torch.arange(
                rows if num_logits is None else num_logits, dtype=torch.int32
            ),
            "stored_mask": stored.mask_B1US,
            "new_mask": new_mask,
        }
        self._inputs |= dict(zip(_cache_names(self._num_layers), stored.entries_XBGSE, strict=True))
        # The graph reads this memory in every pass; self._inputs keeps it alive.
        for name, each in self._inputs.items():
            values = each.view(-1) if name in ("tokens", "positions") else each
            self._request.set_tensor(name, openvino.Tensor(values.numpy(), shared_memory=True))

    def run(self, tokens_BQ: Tensor, position_BQ: Tensor) -> None:
        """Run a pass; positions beyond the last one are replaced by it."""
        self._inputs["tokens"].copy_(tokens_BQ)
        self._inputs["positions"].copy_(position_BQ.clamp(max=self._last_position))
        self._request.infer()

    def logits(self, tokens_BQ: Tensor) -> Tensor:
        """Return the logits of the last pass, [B, Q, V]."""
        logits_RV = torch.from_numpy(self._request.get_output_tensor(0).data)
        return logits_RV.view(*tokens_BQ.shape, -1)

    def is_finite(self) -> Tensor:
        """Return whether the hidden state of each row of the last pass is finite, bool [R]."""
        return torch.from_numpy(self._request.get_output_tensor(1).data).isfinite()

    def new_entries(self) -> Tensor:
        """Return the entries of the rows of the last pass, [L, 2, R, G*E]; all are finite."""
        new = torch.from_numpy(self._request.get_output_tensor(2).data)
        return new.view(len(new), self._num_layers, 2, -1).movedim(0, 2)


def _cache_names(num_layers: int) -> list[str]:
    return [f"{kind}{layer}" for layer in range(num_layers) for kind in ("keys", "values")]


def build_graphs(
    weights: DecoderWeights, model: ModelConfig, engine: EngineConfig
) -> tuple[DraftGraph, DraftGraph]:
    """Compile the graph, twice if its weights are small; otherwise both are one object.

    A pass whose shape differs from the one before it takes 1.2 ms more, in which OpenVINO prepares
    its nodes (a pass of the embedded draft: 1 to 3 ms). Passes of two shapes that alternate need
    two graphs, each with its own packed weights.

    Raises:
        SetupError: OpenVINO cannot compile it on this machine.
    """
    heads, size = model.num_kv_heads, model.head_size
    group = model.num_heads // heads
    inputs = {
        "tokens": opset15.parameter([-1], np.int32),
        "positions": opset15.parameter([-1], np.int32),
        "shape": opset15.parameter([2], np.int64),
        "logit_rows": opset15.parameter([-1], np.int32),
        "stored_mask": opset15.parameter([-1, 1, -1, -1], np.float32),
        "new_mask": opset15.parameter([1, 1, -1, -1], np.float32),
    }
    new: list[Node] = []

    def per_session(rows: Node, each: int) -> Node:
        """[B*Q, G*each*E] -> [B, G, Q*each, E]."""
        shape = opset15.concat([inputs["shape"], ints(heads, each, size)], 0)
        split = opset15.reshape(rows, shape, special_zero=False)
        moved = opset15.transpose(split, ints(0, 2, 1, 3, 4))
        return reshape(moved, 0, heads, -1, size)

    def attend(layer: int, queries: Node, keys: Node, values: Node) -> Node:
        stored = [opset15.parameter([-1, heads, -1, size], np.float32) for _ in range(2)]
        inputs[f"keys{layer}"], inputs[f"values{layer}"] = stored
        keys, values = finite_or_zero(keys), finite_or_zero(values)
        new.extend((keys, values))
        scaled = opset15.multiply(per_session(queries, group), number(size**-0.5))
        new_keys, new_values = per_session(keys, 1), per_session(values, 1)
        on_stored = opset15.add(product_with_transposed(scaled, stored[0]), inputs["stored_mask"])
        on_new = opset15.add(product_with_transposed(scaled, new_keys), inputs["new_mask"])
        shares = opset15.softmax(opset15.concat([on_stored, on_new], 3), 3)
        num_stored = opset15.gather(opset15.shape_of(stored[0]), ints(2), ints(0))
        num_new = opset15.gather(inputs["shape"], ints(1), ints(0))
        parts = opset15.variadic_split(
            shares, opset15.constant(3), opset15.concat([num_stored, num_new], 0)
        )
        seen = opset15.add(
            product(parts.output(0), stored[1]),
            product(parts.output(1), new_values),
        )
        split = reshape(seen, 0, heads, -1, group, size)
        moved = opset15.transpose(split, ints(0, 2, 1, 3, 4))
        return reshape(moved, -1, heads * group * size)

    graph_parts = Seen(
        rotation=Rotation(model, engine.max_model_len, inputs["positions"]),
        attend=attend,
    )
    nodes = graph_weights(model, weights, engine.weights)
    outputs = build_decoder(model, nodes, inputs["tokens"], inputs["logit_rows"], graph_parts)
    requests = compile_graph(
        (*outputs, opset15.concat(new, 1)),
        inputs,
        engine,
        num_copies=2,
        max_copied_bytes=MAX_COPIED_BYTES,
    )
    graphs = [DraftGraph(each, model, engine.max_model_len) for each in requests]
    return graphs[0], graphs[-1]
