"""The graph of a whole table of one session: each step but the last one chooses a column.

Each step sees the stored entries of the session and the own entries of its branch, which are values
inside the graph. It chooses argmax(logits + T * noise), where filters of the session lower logits,
and the next step runs the chosen tokens.

*Decision*: a table of one session of a small draft is one pass. *Because*: between two of six
passes, Python takes .3 ms with cold caches, and another thread may take the interpreter. From the
commit to the table of 24 branches 6.8 instead of 7.8 ms, of which this pass takes 4.8 (embedded
draft, one AVX-512 core, float32). The last step, which only ranks candidates, is a part of it: a
pass of its own takes 2.9 ms (AVX2), for which the next commit waits. *Not chosen*: the same for
several sessions, since each number of them is a shape, and for large weights, whose columns are
worth sending one by one. *Revisit when* tables of several sessions are late.

*Decision*: the graph has the filters in a branch (``If``). *Because*: a table of 24 branches takes
11.8 ms without filters in the graph. With them it takes 11.1 ms for a session without a filter and
12.3 ms for one with top-k, but 12.8 ms for both without the branch (median of 150, interleaved,
embedded draft, one AVX2 core of a busy machine). *Not chosen*: to build such tables step by step,
which takes about twice as long. *Revisit when* filters need other operations.

Letters: U = N x heads of a group, S stored entries, Y rows of noise, G groups of token ids; K are
the columns of the table, P = K + 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from openvino import Node, opset15
from openvino.op import if_op
from torch import Tensor

from ssd.engine.batch import BranchBatch, StoredNoise
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.openvino_engine.decoder import GraphWeights, build_decoder
from ssd.engine.openvino_engine.layers import (
    Rotation,
    ints,
    number,
    port,
    product,
    product_with_transposed,
    reshape,
    rows_of,
)
from ssd.engine.sampling.soft_filters import FACTOR, LOWEST, num_groups_of
from ssd.types import NO_TOKEN

Values = TypeVar("Values", bound=NDArray[Any])


class TableGraph:
    """A compiled graph. Step thread only; results are valid until the next pass."""

    def __init__(
        self, request: openvino.InferRequest, engine: EngineConfig, branches: int, length: int
    ) -> None:
        self._request = request
        self._last_position = engine.max_model_len - 1
        columns = length + 1
        self._step_P1 = np.arange(columns)[:, None]
        self._tokens_N = self._input("tokens", np.zeros(branches, np.int32))
        self._positions_PN = self._input("positions", np.zeros((columns, branches), np.int32))
        self._noise_rows_KN = self._input("noise_rows", np.zeros((columns - 1, branches), np.int32))
        self._temperatures_N1 = self._input("temperatures", np.zeros((branches, 1), np.float32))
        self._is_filtered_1 = self._input("is_filtered", np.zeros(1, np.bool_))
        self._rank_1 = self._input("rank", np.zeros(1, np.int32))
        self._min_logit_1 = self._input("min_logit", np.zeros(1, np.float32))
        self._noise_YV: Tensor | None = None
        self._stored: Mapping[str, openvino.Tensor] = {}

    def run(
        self,
        stored: Mapping[str, openvino.Tensor],
        outputs: Sequence[openvino.Tensor],
        batch: BranchBatch,
        noise: StoredNoise,
    ) -> Tensor:
        """Run all steps.

        Args:
            stored: ``stored_mask`` [1, 1, U, S] and the stored entries, as in ``PassInputs``.
            outputs: where to write the own entries, float32 [X, G, N, P, E], and the logits of
                each step, float32 [N, V].
            batch: step 0 of one session.
            noise: of the tokens to choose.

        Returns:
            The chosen tokens, int32 [K, N].
        """
        if stored is not self._stored:
            self._stored = stored
            for name, tensor in stored.items():
                if name.startswith("stored"):
                    self._request.set_tensor(name, tensor)
            for index, output in enumerate(outputs, start=1):
                self._request.set_output_tensor(index, output)
        if noise.noise_YV is not self._noise_YV:
            self._noise_YV = noise.noise_YV
            self._input("noise", noise.noise_YV.numpy())
        self._tokens_N[:] = batch.tokens_BN.numpy()[0]
        first_N = batch.accepted_BN.numpy()[0] + int(batch.trunk_lengths_B) + 1
        np.minimum(
            first_N + self._step_P1,
            self._last_position,
            out=self._positions_PN,
            casting="same_kind",
        )
        self._noise_rows_KN[:] = noise.rows_KR
        self._temperatures_N1[:, 0] = noise.temperature_R.numpy()
        self._is_filtered_1[0] = noise.filters is not None
        if noise.filters is not None:
            self._rank_1[0] = noise.filters.ranks_R[0]
            self._min_logit_1[0] = noise.filters.min_logit_R[0]
        self._request.infer(share_outputs=True)
        return torch.from_numpy(self._request.get_output_tensor(0).data)

    def _input(self, name: str, values: Values) -> Values:
        self._request.set_tensor(name, openvino.Tensor(values, shared_memory=True))
        return values


def build_table_graph(
    weights: GraphWeights, model: ModelConfig, engine: EngineConfig, branches: int, length: int
) -> tuple[list[Node], dict[str, Node]]:
    """Return the outputs and the inputs by name: see ``TableGraph.run``."""
    columns, heads, size = length + 1, model.num_kv_heads, model.head_size
    group = model.num_heads // heads
    parameter = opset15.parameter
    inputs = {
        "tokens": parameter([branches], np.int32),
        "positions": parameter([columns, branches], np.int32),
        "stored_mask": parameter([1, 1, branches * group, -1], np.float32),
        "noise": parameter([-1, model.vocab_size], np.float32),
        "noise_rows": parameter([columns - 1, branches], np.int32),
        "temperatures": parameter([branches, 1], np.float32),
        **filter_inputs(),
    }
    stored = [parameter([1, heads, -1, size], np.float32) for _ in range(2 * model.num_layers)]
    inputs |= {f"stored{index}": node for index, node in enumerate(stored)}
    num_stored = opset15.gather(opset15.shape_of(inputs["stored_mask"]), ints(3), ints(0))
    own: list[list[Node]] = [[] for _ in stored]

    def per_branch(rows: Node, per_head: int) -> Node:
        """[N, G*per_head*E] -> [1, G, N, per_head, E]."""
        return opset15.transpose(reshape(rows, 1, -1, heads, per_head, size), ints(0, 2, 1, 3, 4))

    def attend(layer: int, queries: Node, keys: Node, values: Node) -> Node:
        keys_of, values_of = 2 * layer, 2 * layer + 1
        for kind, new in ((keys_of, keys), (values_of, values)):
            # What is not finite stays in its branch.
            own[kind].append(per_branch(new, 1))
        own_keys, own_values = (opset15.concat(own[kind], 3) for kind in (keys_of, values_of))
        scaled = opset15.multiply(per_branch(queries, group), number(size**-0.5))
        on_stored = product_with_transposed(reshape(scaled, 1, heads, -1, size), stored[keys_of])
        on_own = reshape(product_with_transposed(scaled, own_keys), 1, heads, branches * group, -1)
        scores = opset15.concat([opset15.add(on_stored, inputs["stored_mask"]), on_own], 3)
        shares = opset15.variadic_split(
            opset15.softmax(scores, 3),
            opset15.constant(3),
            opset15.concat([num_stored, ints(-1)], 0),
        )
        of_stored = product(shares.output(0), stored[values_of])
        of_own = product(reshape(shares.output(1), 1, heads, branches, group, -1), own_values)
        seen = opset15.add(reshape(of_stored, 1, heads, branches, group, size), of_own)
        return reshape(opset15.transpose(seen, ints(0, 2, 1, 3, 4)), -1, heads * group * size)

    num_ids = min(model.vocab_size, engine.num_token_ids or model.vocab_size)
    tokens, all_tokens, all_logits = inputs["tokens"], [], []
    for step in range(columns):
        of_step = opset15.constant(np.int32(step))
        rotation = Rotation(model, engine.max_model_len, rows_of(inputs["positions"], of_step))
        every_row = opset15.constant(np.arange(branches, dtype=np.int32))
        logits, _ = build_decoder(model, weights, tokens, every_row, rotation, attend)
        all_logits.append(logits)
        if step == columns - 1:
            break
        noise = rows_of(inputs["noise"], rows_of(inputs["noise_rows"], of_step))
        scores = opset15.add(
            lowered(logits, inputs, num_ids), opset15.multiply(inputs["temperatures"], noise)
        )
        scores = _first_ids(scores, num_ids)
        chosen = _largest(scores)
        tokens = opset15.maximum(chosen, opset15.constant(np.int32(0)))
        all_tokens.append(reshape(chosen, 1, branches))
    entries = opset15.concat([opset15.concat(steps, 3) for steps in own], 0)
    return [opset15.concat(all_tokens, 0), entries, *all_logits], inputs


def filter_inputs() -> dict[str, Node]:
    """Return the inputs of ``lowered``: the filters of a session, as in ``RowFilters``."""
    return {
        "is_filtered": opset15.parameter([1], np.bool_),
        "rank": opset15.parameter([1], np.int32),
        "min_logit": opset15.parameter([1], np.float32),
    }


def lowered(logits: Node, filters: Mapping[str, Node], num_ids: int) -> Node:
    """Return ``soft_filters.lowered`` of [N, V], of which token ids are the first columns."""
    lowest = _lowest_kept(logits, filters, num_ids)
    less = opset15.add(
        opset15.multiply(logits, number(1.0 + FACTOR)), opset15.multiply(lowest, number(-FACTOR))
    )
    return opset15.minimum(logits, less)


def _lowest_kept(logits: Node, filters: Mapping[str, Node], num_ids: int) -> Node:
    """Return f of ``lowered``, [N, 1]; ``LOWEST`` for a session without a filter."""
    shape_NV = logits.output(0).get_partial_shape().to_shape()
    logits_NV = opset15.parameter(shape_NV, np.float32)
    rank, min_logit = opset15.parameter([1], np.int32), opset15.parameter([1], np.float32)
    num_groups = num_groups_of(num_ids)
    grouped = _first_ids(logits_NV, num_ids - num_ids % num_groups)
    maxima_NG = opset15.reduce_max(reshape(grouped, 0, -1, num_groups), ints(1))
    count = opset15.constant(np.int32(num_groups))
    ordered = opset15.topk(maxima_NG, count, 1, "max", "value", index_element_type="i32").output(0)
    zero, column = opset15.constant(np.int32(0)), opset15.constant(np.int32(1))
    # Ranks may count the padding of a vocabulary, too.
    index = opset15.clamp(opset15.subtract(rank, column), 0, num_groups - 1)
    of_top_k = opset15.select(
        opset15.greater(rank, zero), opset15.gather(ordered, index, column), number(LOWEST)
    )
    best = opset15.gather(ordered, opset15.constant(np.zeros(1, np.int32)), column)
    of_min_p = opset15.add(best, min_logit)
    lowest = opset15.maximum(opset15.maximum(of_top_k, of_min_p), number(LOWEST))
    filtered = openvino.Model([port(lowest)], [logits_NV, rank, min_logit], "filtered")
    none = opset15.constant(np.full((shape_NV[0], 1), LOWEST, dtype=np.float32))
    unfiltered = openvino.Model([port(none)], [], "unfiltered")
    branch = if_op(port(filters["is_filtered"]))
    branch.set_then_body(filtered)
    branch.set_else_body(unfiltered)
    seen = (logits, logits_NV), (filters["rank"], rank), (filters["min_logit"], min_logit)
    for outer, inner in seen:
        branch.set_input(port(outer), inner, None)
    return branch.set_output(filtered.results[0], unfiltered.results[0])


def _first_ids(x: Node, num_ids: int) -> Node:
    """Return the first columns of [N, V]."""
    if x.output(0).get_partial_shape()[1] == num_ids:
        return x
    return opset15.slice(x, ints(0), ints(num_ids), ints(1), ints(1))


def _largest(scores: Node) -> Node:
    """Return the best id of each row, int32 [R]; ``NO_TOKEN`` if its score is not finite."""
    count = opset15.constant(np.int32(1))
    best = opset15.topk(scores, count, 1, "max", "none", index_element_type="i32")
    is_token = opset15.is_finite(best.output(0))
    no_token = opset15.constant(np.int32(NO_TOKEN))
    return reshape(opset15.select(is_token, best.output(1), no_token), -1)
