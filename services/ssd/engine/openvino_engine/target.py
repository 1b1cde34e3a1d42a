"""A target's passes as one graph with paged attention.

The KV storage is the memory of the graph's cache inputs: the attention writes the new entries into
their pages and reads the pages of each sequence, so sequences of different lengths share a pass
without padding. Rows are packed: a pass has as many as its sequences have columns.

*Same bits*: the attention has one kernel for sequences of one column and one for sequences of more,
which sum in different orders. In a verify, each row is a sequence of one column: it sees the
entries that the same pass writes for the rows before it. In a prefill, the rows are one sequence of
at least two columns. With fewer sequences than threads, the attention would divide the sums of a
sequence among the threads. An empty sequence in each verify prevents that: with it, the attention
divides only sequences and heads. The matrix products are those of the plugin. Some have kernels of
their own for few rows or many: those of quantised weights on CPUs with AVX2 for one row, and for
more than 80. Then a pass has rows of padding, and a larger one is divided. ``same_bits`` proves at
start that rows have the same bits, and selects the limits.

*Decision*: rows are sequences. *Because*: the kernel for more columns packs all keys and values of
a sequence again in each pass. Embedded target, float32, one core, context 256, against sequences of
K + 1 columns, ms of plain decoding with 1, 8 and 16 sequences: 3.0, 7.7 and 11.3 against 3.3, 9.6
and 15.4; verifies of 7 rows took the same. *Revisit when* contexts are so long that the rows of a
sequence should read its entries together.
"""

from dataclasses import dataclass

import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from openvino import Node, opset15
from openvino.op import _PagedAttentionExtension
from torch import Tensor

from ssd.engine.batch import PagedBatch, pad_sequences
from ssd.engine.config import BLOCK_SIZES, EngineConfig, ModelConfig, sequence_buckets
from ssd.engine.execution import ONE_SHAPE
from ssd.engine.memory import plan_blocks
from ssd.engine.models.decoder_weights import DecoderWeights
from ssd.engine.openvino_engine.decoder import (
    PRECISIONS,
    build_decoder,
    compile_graph,
    graph_weights,
)
from ssd.engine.openvino_engine.layers import Rotation, finite_or_zero, ints, port
from ssd.engine.openvino_engine.matrix import over
from ssd.engine.precision import DTYPES

MIN_STORED = 2
"""Smallest number of rows of a prefill."""
ANY = 1 << 20
ROW_LIMITS = ((1, ANY), (2, ANY), (2, 64), (5, 64))
"""Smallest and largest numbers of rows of a pass, in the order in which they are tried. Kernels for
few rows end at one row or at four; chunks of a prompt are multiples of 64 rows, or shorter."""
BLOCK_SIZE = BLOCK_SIZES["openvino"]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedPass:
    """A verify: the inputs of the graph by name, part by part, and where rows are in the batch."""

    num_sequences: int
    """Number of sequences that are not padding; they come first."""
    parts: list[dict[str, openvino.Tensor]]
    is_row_BP: NDArray[np.bool_]


class OpenVinoTarget:
    """A graph and its KV storage; see ``TargetExecution``."""

    def __init__(self, weights: DecoderWeights, model: ModelConfig, engine: EngineConfig) -> None:
        assert engine.block_size == BLOCK_SIZE, engine.block_size
        self.attention_name = "openvino"
        self.num_parameters = 0
        self.packs_rows = not engine.deterministic
        self._row_limits = list(ROW_LIMITS)
        self._max_sequences = engine.max_num_seqs
        self.sequence_counts = sequence_buckets(engine)
        self._last_position = engine.max_model_len - 1
        self._request, caches = _build(weights, model, engine)
        # After the weights have been packed: the rest of the memory is for the KV cache.
        self.num_blocks = plan_blocks(model, engine)
        shape = (len(caches), self.num_blocks, model.num_kv_heads, BLOCK_SIZE, model.head_size)
        self.storage = torch.zeros(shape, dtype=DTYPES[engine.dtype])
        for name, cache in zip(caches, self.storage, strict=True):
            self._request.set_tensor(name, over(cache))

    def use_fewer_shapes(self) -> str | None:
        """See ``TargetExecution.use_fewer_shapes``."""
        if not self.packs_rows:
            return None
        if len(self._row_limits) > 1:
            self._row_limits.pop(0)
            least, most = self._row_limits[0]
            return (
                f"passes of {least} rows or more"
                if most == ANY
                else f"passes of {least} to {most} rows"
            )
        self._row_limits = [ROW_LIMITS[0]]
        self.packs_rows = False
        self.sequence_counts = self.sequence_counts[-1:]
        return ONE_SHAPE

    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        tokens_R = batch.tokens_BP[0].numpy()
        if self.packs_rows:
            tokens_R = tokens_R[: int(batch.num_columns_B[0])]
        first, tables_1J = batch.first_positions_B.numpy(), batch.block_tables_BJ.numpy()
        min_rows, max_rows = self._row_limits[0]
        found = []
        for start in range(0, len(tokens_R), max_rows):
            part_R = tokens_R[start : start + max_rows]
            # The entries of copies, at the next positions, are overwritten before they are read.
            part_R = np.resize(part_R, max(len(part_R), min_rows, MIN_STORED))
            inputs = self._sequences(first + start, np.array([len(part_R)]), tables_1J)
            inputs |= {"tokens": part_R, "logit_rows": np.zeros(0, np.int64)}
            self._infer({name: _tensor(each) for name, each in inputs.items()})
            found.append(torch.from_numpy(self._request.get_output_tensor(1).data).isfinite())
        return torch.cat(found)

    def prepare(self, batch: PagedBatch) -> PackedPass:
        """Pack the rows of the batch; at one shape, padding runs as well."""
        num_sequences = len(batch.tokens_BP)
        if not self.packs_rows:
            batch = pad_sequences(batch, self._max_sequences)
        tokens_BP = batch.tokens_BP.numpy()
        is_row_BP = np.ones(tokens_BP.shape, dtype=np.bool_)
        if self.packs_rows:
            is_row_BP = np.arange(tokens_BP.shape[1]) < batch.num_columns_B.numpy()[:, None]
        sequence_R, column_R = is_row_BP.nonzero()
        first_R = batch.first_positions_B.numpy()[sequence_R] + column_R
        tables_RJ = batch.block_tables_BJ.numpy()[sequence_R]
        tokens_R, most = tokens_BP[is_row_BP], self._row_limits[0][1]
        parts = [slice(start, start + most) for start in range(0, len(first_R), most)]
        packed = [self._pack(tokens_R[part], first_R[part], tables_RJ[part]) for part in parts]
        return PackedPass(num_sequences, packed, is_row_BP)

    def verify(self, prepared: PackedPass) -> Tensor:
        """See ``TargetExecution.verify``."""
        is_row_BP = prepared.is_row_BP
        if len(prepared.parts) == 1:
            logits_RV = self._logits(prepared.parts[0])
        else:
            logits_RV = torch.cat([self._logits(part).clone() for part in prepared.parts])
        logits_RV = logits_RV[: np.count_nonzero(is_row_BP)]
        if is_row_BP.all():
            return logits_RV.view(*is_row_BP.shape, -1)[: prepared.num_sequences]
        logits_BPV = torch.empty((*is_row_BP.shape, logits_RV.shape[1]))
        logits_BPV[torch.from_numpy(is_row_BP)] = logits_RV
        return logits_BPV

    def verify_seconds(self) -> None:
        """See ``TargetExecution.verify_seconds``."""
        return

    def _logits(self, inputs: dict[str, openvino.Tensor]) -> Tensor:
        """Run a pass; its logits are valid until the next one."""
        self._infer(inputs)
        return torch.from_numpy(self._request.get_output_tensor(0).data)

    def _pack(self, tokens_R: Ints, first_R: Ints, tables_RJ: Ints) -> dict[str, openvino.Tensor]:
        """Return the inputs of a pass whose rows are sequences."""
        if (missing := self._row_limits[0][0] - len(first_R)) > 0:
            # Rows of padding write to the reserved block, and nothing reads their logits.
            tokens_R, first_R = np.pad(tokens_R, (0, missing)), np.pad(first_R, (0, missing))
            tables_RJ = np.pad(tables_RJ, ((0, missing), (0, 0)))
        inputs = self._sequences(first_R, np.ones_like(first_R), tables_RJ)
        inputs |= {"tokens": tokens_R, "logit_rows": np.arange(len(first_R))}
        # The empty sequence.
        for name in ("past_lens", "subsequence_begins", "block_indices_begins"):
            inputs[name] = np.append(inputs[name], 0 if name == "past_lens" else inputs[name][-1])
        return {name: _tensor(each) for name, each in inputs.items()}

    def _sequences(self, first_S: Ints, counts_S: Ints, tables_SJ: Ints) -> dict[str, Ints]:
        """Return the inputs of the attention for sequences of new rows after these positions."""
        length_S = first_S + counts_S
        num_blocks_S = -(-length_S // BLOCK_SIZE)
        begins_S = _begins(counts_S)
        positions_R = np.arange(begins_S[-1]) + (first_S - begins_S[:-1]).repeat(counts_S)
        return {
            "positions": np.minimum(positions_R, self._last_position),
            "past_lens": first_S,
            "subsequence_begins": begins_S,
            "block_indices": _blocks(tables_SJ, num_blocks_S),
            "block_indices_begins": _begins(num_blocks_S),
            "max_context_len": length_S.max(keepdims=True),
        }

    def _infer(self, inputs: dict[str, openvino.Tensor]) -> None:
        for name, tensor in inputs.items():
            self._request.set_tensor(name, tensor)
        self._request.infer(share_outputs=True)


def _tensor(values: NDArray[np.generic]) -> openvino.Tensor:
    """Return an int32 tensor that shares the memory of a new array."""
    return openvino.Tensor(np.ascontiguousarray(values, dtype=np.int32), shared_memory=True)


def _begins(counts_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of several runs begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(counts_B)))


def _blocks(tables_BJ: NDArray[np.int64], num_blocks_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first blocks of each sequence; blocks beyond its table are the reserved one."""
    missing = int(num_blocks_B.max()) - tables_BJ.shape[1]
    if missing > 0:
        tables_BJ = np.pad(tables_BJ, ((0, 0), (0, missing)))
    return tables_BJ[np.arange(tables_BJ.shape[1]) < num_blocks_B[:, None]]


def _build(
    weights: DecoderWeights, model: ModelConfig, engine: EngineConfig
) -> tuple[openvino.InferRequest, list[str]]:
    """Build and compile the graph; returns the names of its cache inputs too."""
    names = (
        *("tokens", "logit_rows", "positions", "past_lens"),
        *("subsequence_begins", "block_indices", "block_indices_begins", "max_context_len"),
    )
    inputs = {name: opset15.parameter([-1], np.int32, name) for name in names}
    caches: dict[str, Node] = {}
    longest = opset15.squeeze(inputs["max_context_len"], ints(0))

    def attend(layer: int, queries: Node, keys: Node, values: Node) -> Node:
        pages = [
            opset15.parameter(
                [-1, model.num_kv_heads, BLOCK_SIZE, model.head_size], PRECISIONS[engine.dtype]
            )
            for _ in range(2)
        ]
        caches[f"keys{layer}"], caches[f"values{layer}"] = pages
        sequences = [inputs[name] for name in names[3:7]]
        new = [queries, finite_or_zero(keys), finite_or_zero(values)]
        attention = _PagedAttentionExtension(
            [port(each) for each in (*new, *pages, *sequences, *_options(model.head_size, longest))]
        )
        facts = attention.get_rt_info()
        for kind in "kv":
            facts[f"num_{kind}_heads"] = model.num_kv_heads
            facts[f"{kind}_head_size"] = model.head_size
        return attention.output(0)

    rotation = Rotation(model, engine.max_model_len, inputs["positions"])
    nodes = graph_weights(model, weights, engine.weights)
    tokens, logit_rows = inputs["tokens"], inputs["logit_rows"]
    outputs = build_decoder(model, nodes, tokens, logit_rows, rotation, attend)
    (request,) = compile_graph(outputs, inputs | caches, engine)
    return request, list(caches)


def _options(head_size: int, longest: Node) -> list[Node]:
    """Return inputs 9 to 27 of the attention: scale and length, and unused features."""

    def empty(kind: type[np.generic], *shape: int) -> Node:
        return opset15.constant(np.zeros(shape, kind))

    scale = opset15.constant(np.float32(head_size**-0.5))
    no_ints, no_floats, zero = empty(np.int32, 0), empty(np.float32, 0), empty(np.int32)
    return [
        *(scale, zero, no_floats, longest),  # sliding window, slopes
        *(no_ints, no_ints, no_ints, no_floats),  # aggregated scores, rotation of the cache
        *(no_floats, zero, zero),  # sparse attention
        empty(np.float32, 0, 0, 0, 0),  # sinks
        *(zero, no_ints, no_ints, no_ints),  # eviction
        *(no_ints, empty(np.uint8, 0), no_ints),  # kinds of tokens, masks among new tokens
    ]
