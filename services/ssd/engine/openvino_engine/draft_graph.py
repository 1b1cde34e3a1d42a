"""The graph of a draft's passes, and its inputs.

Each pass has Q new rows of each session. A row sees three kinds of entries, each under an additive
mask: *stored* entries of its session, *own* entries that no other row sees, and the new rows. The
graph returns the keys and values of the new rows.

*Decision*: the tokens of a step are chosen outside of this graph. *Because*: numpy finds the
largest of 4,096 scores of 24 rows in 5 us, ``TopK`` with open shapes in 150. *Revisit when* a
plugin is as fast as numpy.

*Decision*: each row has its own entries in a small product. *Because*: as columns that other rows
do not see, 7 steps of 24 branches are 168 columns of every product, mask and softmax: .83 instead
of .73 ms a pass of the embedded draft after 250 tokens (one AVX-512 core). *Revisit when* such
products are slow on a CPU.

Letters: Q rows of a session, U = Q x heads of a group, S stored entries, O own entries of a row, X
keys and values of layers.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import openvino
import torch
from openvino import Node, opset15
from torch import Tensor

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.weights import DecoderWeights
from ssd.engine.openvino_engine.decoder import (
    GraphWeights,
    build_decoder,
    compile_graph,
    graph_weights,
)
from ssd.engine.openvino_engine.layers import (
    Rotation,
    finite_or_zero,
    ints,
    number,
    product,
    product_with_transposed,
    reshape,
)
from ssd.engine.openvino_engine.table_graph import TableGraph, build_table_graph

MAX_COPIED_BYTES = 64 << 20
"""Weights that are worth several copies. Copies save the time in which OpenVINO prepares its nodes
when the shape of a pass changes (.3 ms for a shape that it knows, else 2 ms), and a tenth of the
passes of one session, whose copies have fixed shapes but for S."""


class PassInputs:
    """The inputs of passes of one shape, in memory that the graph reads in every pass."""

    def __init__(
        self,
        entries_XBGSE: Tensor,
        stored_mask_B1US: Tensor,
        own_XBGQOE: Tensor,
        new_mask: Tensor,
        *,
        needs_logits: bool = True,
    ) -> None:
        """Construct. In place of B, Q and O, the own entries may have 1, if no row has any.

        The own entries are finite, and no row sees them until ``own_mask_O`` changes. The mask of
        the new rows is [1, 1, U, Q]. Each row needs logits, or none.
        """
        num_rows = len(stored_mask_B1US) * new_mask.shape[3]
        self.tokens_R = np.zeros(num_rows, dtype=np.int32)
        self.positions_R = np.zeros(num_rows, dtype=np.int32)
        self.own_mask_O = np.full(own_XBGQOE.shape[4], -np.inf, dtype=np.float32)
        arrays = {
            "tokens": self.tokens_R,
            "positions": self.positions_R,
            "logit_rows": np.arange(num_rows if needs_logits else 0, dtype=np.int32),
            "stored_mask": stored_mask_B1US.numpy(),
            "own_mask": self.own_mask_O,
            "new_mask": new_mask.numpy(),
        }
        for index, (stored, own) in enumerate(zip(entries_XBGSE, own_XBGQOE, strict=True)):
            arrays |= {f"stored{index}": stored.numpy(), f"own{index}": own.numpy()}
        self.tensors = {
            name: openvino.Tensor(array, shared_memory=True) for name, array in arrays.items()
        }


class DraftGraph:
    """A compiled graph. Step thread only; results are valid until the next pass."""

    def __init__(self, request: openvino.InferRequest, max_len: int) -> None:
        self._request = request
        self._last_position = max_len - 1
        self._inputs: PassInputs | None = None

    def run(
        self,
        inputs: PassInputs,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        logits: openvino.Tensor | None = None,
    ) -> None:
        """Run a pass of int64 tokens; positions beyond the last one are replaced by it.

        Passes that follow each other may share the other inputs. The logits are written into
        ``logits``, float32 [R, V], or memory of this graph.
        """
        if inputs is not self._inputs:
            self._inputs = inputs
            for name, tensor in inputs.tensors.items():
                self._request.set_tensor(name, tensor)
        inputs.tokens_R[:] = tokens_BQ.numpy().reshape(-1)
        np.minimum(
            positions_BQ.numpy().reshape(-1),
            self._last_position,
            out=inputs.positions_R,
            casting="same_kind",
        )
        if logits is None:
            logits = openvino.Tensor(openvino.Type.f32, openvino.Shape([0, 0]))
        self._request.set_output_tensor(0, logits)
        self._request.infer(share_outputs=True)

    def logits(self) -> Tensor:
        """Return the logits of the last pass, [R, V]."""
        return torch.from_numpy(self._request.get_output_tensor(0).data)

    def is_finite(self) -> Tensor:
        """Return whether the hidden state of each row of the last pass is finite, bool [R]."""
        return torch.from_numpy(self._request.get_output_tensor(1).data).isfinite()

    def new_entries(self, num_kinds: int) -> Tensor:
        """Return the new entries of the last pass, [X, B, G, Q, E] with X kinds; all are finite."""
        new = torch.from_numpy(self._request.get_output_tensor(2).data)
        entries_XBGQE: Tensor = new.unflatten(0, (num_kinds, -1))
        return entries_XBGQE


class DraftGraphs:
    """The graph, compiled once, or for each kind of pass if its weights are small."""

    def __init__(self, weights: DecoderWeights, model: ModelConfig, engine: EngineConfig) -> None:
        """Build and compile.

        Raises:
            SetupError: OpenVINO cannot compile it on this machine.
        """
        nodes = self.weights = graph_weights(model, weights, engine)
        is_small = nodes.num_bytes <= MAX_COPIED_BYTES
        counts = engine.branch_counts if is_small else ()
        rows = (1, engine.num_columns) if is_small else ()
        outputs, inputs = build_graph(nodes, model, engine)
        copies = [fixed_shapes(model, engine, count, of_branches=True) for count in counts]
        copies += [fixed_shapes(model, engine, count, of_branches=False) for count in rows]
        requests = compile_graph(outputs, inputs, engine, [{}, *copies] if copies else [])
        graphs = [DraftGraph(request, engine.max_model_len) for request in requests]
        self.causal, self._branching, *of_one = graphs if copies else (*graphs, *graphs)
        self._branching_of_one = dict(zip(counts, of_one, strict=False))
        self._causal_of_one = dict(zip(rows, of_one[len(counts) :], strict=True))
        self.tables: dict[tuple[int, int], TableGraph] = {}
        """By branches and columns, the graph of a whole table of one session."""
        for size in itertools.product(counts, engine.table_lengths):
            outputs, inputs = build_table_graph(nodes, model, engine, *size)
            (request,) = compile_graph(outputs, inputs, engine)
            self.tables[size] = TableGraph(request, engine, *size)
        nodes.release()

    def branching(self, num_sessions: int, branches: int) -> DraftGraph:
        """Return the graph of a step of so many branches."""
        if num_sessions > 1:
            return self._branching
        return self._branching_of_one.get(branches, self._branching)

    def explicit(self, num_sessions: int, rows: int) -> DraftGraph:
        """Return the graph of a causal pass over so many explicit tokens of each session."""
        return self._causal_of_one.get(rows, self.causal) if num_sessions == 1 else self.causal


def fixed_shapes(
    model: ModelConfig, engine: EngineConfig, rows: int, *, of_branches: bool
) -> Mapping[str, Sequence[int]]:
    """Return the shapes of the inputs of a pass of one session; only S stays open."""
    heads, size = model.num_kv_heads, model.head_size
    num_queries = rows * (model.num_heads // heads)
    own = (rows, engine.num_columns) if of_branches else (1, 1)
    shapes: dict[str, Sequence[int]] = {
        "tokens": [rows],
        "positions": [rows],
        "logit_rows": [rows],
        "stored_mask": [1, 1, num_queries, -1],
        "own_mask": own[1:],
        "new_mask": [1, 1, num_queries, rows],
    }
    for index in range(2 * model.num_layers):
        shapes[f"stored{index}"] = [1, heads, -1, size]
        shapes[f"own{index}"] = [1, heads, *own, size]
    return shapes


def build_graph(
    weights: GraphWeights, model: ModelConfig, engine: EngineConfig
) -> tuple[Sequence[Node], dict[str, Node]]:
    """Return the outputs and the inputs by name: see ``DraftGraph`` and ``PassInputs``."""
    heads, size = model.num_kv_heads, model.head_size
    group = model.num_heads // heads
    inputs = {
        "tokens": opset15.parameter([-1], np.int32),
        "positions": opset15.parameter([-1], np.int32),
        "logit_rows": opset15.parameter([-1], np.int32),
        "stored_mask": opset15.parameter([-1, 1, -1, -1], np.float32),
        "own_mask": opset15.parameter([-1], np.float32),
        "new_mask": opset15.parameter([1, 1, -1, -1], np.float32),
    }
    num_stored, num_own, num_new = (
        opset15.gather(opset15.shape_of(inputs[name]), ints(axis), ints(0))
        for name, axis in (("stored_mask", 3), ("own_mask", 0), ("new_mask", 3))
    )
    new: list[Node] = []

    def per_session(rows: Node, per_head: int) -> Node:
        """[B*Q, G*per_head*E] -> [B, G, Q, per_head, E]."""
        shape = opset15.concat([ints(-1), num_new, ints(heads, per_head, size)], 0)
        split = opset15.reshape(rows, shape, special_zero=False)
        return opset15.transpose(split, ints(0, 2, 1, 3, 4))

    def attend(layer: int, queries: Node, keys: Node, values: Node) -> Node:
        stored = [opset15.parameter([-1, heads, -1, size], np.float32) for _ in range(2)]
        own = [opset15.parameter([-1, heads, -1, -1, size], np.float32) for _ in range(2)]
        for kind in range(2):
            inputs[f"stored{2 * layer + kind}"] = stored[kind]
            inputs[f"own{2 * layer + kind}"] = own[kind]
        scaled = opset15.multiply(per_session(queries, group), number(size**-0.5))
        all_scaled = reshape(scaled, 0, 0, -1, size)
        now = [
            reshape(per_session(finite_or_zero(rows), 1), 0, 0, -1, size) for rows in (keys, values)
        ]
        new.extend(now)
        scores = [
            opset15.add(product_with_transposed(all_scaled, stored[0]), inputs["stored_mask"]),
            opset15.reshape(
                opset15.add(product_with_transposed(scaled, own[0]), inputs["own_mask"]),
                opset15.concat([ints(0, 0, -1), num_own], 0),
                special_zero=True,
            ),
            opset15.add(product_with_transposed(all_scaled, now[0]), inputs["new_mask"]),
        ]
        shares = opset15.variadic_split(
            opset15.softmax(opset15.concat(scores, 3), 3),
            opset15.constant(3),
            opset15.concat([num_stored, num_own, num_new], 0),
        )
        of_shared = opset15.add(
            product(shares.output(0), stored[1]), product(shares.output(2), now[1])
        )
        split = opset15.concat([ints(0, 0), num_new, ints(group, -1)], 0)
        of_own = product(opset15.reshape(shares.output(1), split, special_zero=True), own[1])
        seen = opset15.add(opset15.reshape(of_shared, split, special_zero=True), of_own)
        return reshape(opset15.transpose(seen, ints(0, 2, 1, 3, 4)), -1, heads * group * size)

    rotation = Rotation(model, engine.max_model_len, inputs["positions"])
    tokens, logit_rows = inputs["tokens"], inputs["logit_rows"]
    outputs = build_decoder(model, weights, tokens, logit_rows, rotation, attend)
    return (*outputs, opset15.concat(new, 0)), inputs
