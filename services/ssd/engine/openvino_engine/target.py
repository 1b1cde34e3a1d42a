"""A target's passes as one graph with paged attention.

The KV storage is the memory of the graph's cache inputs: the attention writes the new entries into
their pages and reads the pages of each sequence, so sequences of different lengths share a pass
without padding. Rows are packed: a pass has as many as its sequences have columns.

*Same bits*: the matrix products (MLAS) sum in one order for every number of rows. The attention has
one kernel for sequences with one column and one for more columns, which sum in different orders.
Therefore every sequence has at least two columns in the attention: a single one is repeated, and
the entry of the copy, at the next position, is overwritten before it is read. The products still
run one row. Measured with 1, 2 and 4 threads: 1 to 128 columns, alone and among other sequences,
gave equal bits; the kernel for one column differs in the last bits. Loading checks it again, and
selects one shape for all passes if this machine differs.

Letter: A, rows of the attention.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from openvino import Node, opset15
from openvino.op import _PagedAttentionExtension
from torch import Tensor

from ssd.engine.batch import PagedBatch, pad_sequences
from ssd.engine.config import BLOCK_SIZES, EngineConfig, ModelConfig, sequence_buckets
from ssd.engine.memory import plan_blocks
from ssd.engine.models.decoder_weights import DecoderWeights
from ssd.engine.openvino_engine.decoder import Seen, build_decoder, compile_graph
from ssd.engine.openvino_engine.layers import Rotation, finite_or_zero, ints, port, rows_of
from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")
DIFFERENT_BITS = "the bits of a row depend on the number of rows"
MIN_ATTENDED = 2
"""Smallest number of columns of a sequence in the attention."""
BLOCK_SIZE = BLOCK_SIZES["openvino"]
Ints = NDArray[np.int64]
Inputs = dict[str, openvino.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PassShape:
    """What depends only on the number of columns of each sequence of a pass."""

    is_real_BP: NDArray[np.bool_]
    """Where its rows are in the batch."""
    attended_B: Ints
    """Columns of each sequence in the attention."""
    column_A: Ints
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class PackedPass:
    """The inputs of one pass, by name."""

    num_sequences: int
    """Number of sequences that are not padding; they come first."""
    shape: PassShape
    inputs: Inputs
    """Those that are not inputs of the shape."""


class OpenVinoTarget:
    """A graph and its KV storage; see ``TargetExecution``."""

    def __init__(self, weights: DecoderWeights, model: ModelConfig, engine: EngineConfig) -> None:
        assert engine.block_size == BLOCK_SIZE, engine.block_size
        self.attention_name = "openvino"
        self.num_parameters = 0
        self.sequence_counts = sequence_buckets(engine)
        self._engine = engine
        self._request, caches = _build(weights, model, engine)
        # After the weights have been packed: the rest of the memory is for the KV cache.
        self.num_blocks = plan_blocks(model, engine)
        shape = (len(caches), self.num_blocks, model.num_kv_heads, BLOCK_SIZE, model.head_size)
        self.storage = torch.zeros(shape)
        for name, cache in zip(caches, self.storage, strict=True):
            self._request.set_tensor(name, openvino.Tensor(cache.numpy(), shared_memory=True))
        self._shape: PassShape | None = None
        """Of the newest pass, whose inputs are set."""
        self._is_one_shape = engine.deterministic
        if not engine.deterministic and not self._has_same_bits(model.vocab_size):
            self._is_one_shape = True
            _log.warning("one_shape", reason=DIFFERENT_BITS, consequence="slower forward passes")
        self.is_narrow_exact = self.packs_rows = not self._is_one_shape

    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        packed = self._pack(batch, 1)
        packed.inputs["logit_rows"] = _tensor(np.zeros(0))
        self._infer(packed)
        self._shape = None
        return torch.from_numpy(self._request.get_output_tensor(1).data).isfinite()

    def prepare(self, batch: PagedBatch) -> PackedPass:
        """Pack the rows of the batch."""
        num_sequences = len(batch.tokens_BP)
        if self._is_one_shape:
            batch = pad_sequences(batch, self._engine.max_num_seqs)
        return self._pack(batch, num_sequences)

    def verify(self, prepared: PackedPass) -> Tensor:
        """See ``TargetExecution.verify``."""
        self._infer(prepared)
        logits_RV = torch.from_numpy(self._request.get_output_tensor(0).data)
        is_real_BP = prepared.shape.is_real_BP
        if is_real_BP.all():
            return logits_RV.view(*is_real_BP.shape, -1)[: prepared.num_sequences]
        logits_BPV = torch.empty((*is_real_BP.shape, logits_RV.shape[1]))
        logits_BPV[torch.from_numpy(is_real_BP)] = logits_RV
        return logits_BPV

    def verify_seconds(self) -> None:
        """See ``TargetExecution.verify_seconds``."""
        return

    def _has_same_bits(self, vocab_size: int) -> bool:
        """Return whether a row has the same bits in every pass.

        Compared are alone, among K+1 columns, in a full batch, and in several chunks of a prompt.
        """
        count, columns = self._engine.max_num_seqs, self._engine.num_columns
        length = min(max(columns, 4 * self._engine.prefill_chunk), self._engine.max_model_len)
        tokens_P = torch.arange(length) * 7919 % vocab_size
        blocks_J = torch.arange(1, -(-length // BLOCK_SIZE) + 1)

        def verify(num_sequences: int, first: int, last: int) -> Tensor:
            first_B = torch.full((num_sequences,), first)
            batch = PagedBatch(
                tokens_P[first:last].expand(num_sequences, -1),
                first_B,
                torch.full_like(first_B, last - first),
                blocks_J.expand(num_sequences, -1),
            )
            return self.verify(self._pack(batch, num_sequences)).clone()

        wide_PV = verify(1, 0, columns)[0]
        alone_PV = torch.cat([verify(1, each, each + 1)[0] for each in range(columns)])
        full_BPV = verify(count, 0, columns)
        chunks_PV = verify(1, 0, length)[0]
        last_PV = verify(1, length - columns, length)[0]
        return (
            torch.equal(alone_PV, wide_PV)
            and torch.equal(full_BPV, wide_PV.expand(count, -1, -1))
            and torch.equal(chunks_PV[:columns], wide_PV)
            and torch.equal(chunks_PV[-columns:], last_PV)
        )

    def _infer(self, packed: PackedPass) -> None:
        if packed.shape is not self._shape:
            self._shape = packed.shape
            for name, tensor in packed.shape.inputs.items():
                self._request.set_tensor(name, tensor)
        for name, tensor in packed.inputs.items():
            self._request.set_tensor(name, tensor)
        self._request.infer()

    def _pack(self, batch: PagedBatch, num_sequences: int) -> PackedPass:
        """Compute the inputs of a pass; at one shape, padding columns run as well."""
        tokens_BP = batch.tokens_BP.numpy()
        first_B = batch.first_positions_B.numpy()
        width = tokens_BP.shape[1]
        if self._is_one_shape:
            shape = _pass_shape((width,) * len(tokens_BP), width)
        else:
            shape = _pass_shape(tuple(batch.num_columns_B.tolist()), width)
        positions_A = np.repeat(first_B, shape.attended_B) + shape.column_A
        length_B = first_B + shape.attended_B
        num_blocks_B = -(-length_B // BLOCK_SIZE)
        inputs = {
            "tokens": tokens_BP[shape.is_real_BP],
            "positions": np.minimum(positions_A, self._engine.max_model_len - 1),
            "past_lens": first_B,
            "block_indices": _blocks(batch.block_tables_BJ.numpy(), num_blocks_B),
            "block_indices_begins": _begins(num_blocks_B),
            "max_context_len": length_B.max(keepdims=True),
        }
        tensors = {name: _tensor(each) for name, each in inputs.items()}
        return PackedPass(num_sequences, shape, tensors)


@lru_cache(maxsize=256)
def _pass_shape(num_columns: tuple[int, ...], width: int) -> PassShape:
    """Return the shape of a pass over batches of ``width`` columns.

    With few sequences, most passes have a shape that was used before. Computing it takes as long as
    the rest of ``prepare``.
    """
    num_columns_B = np.array(num_columns)
    attended_B = np.maximum(num_columns_B, MIN_ATTENDED)
    begins_B = _begins(attended_B)
    column_A = np.arange(begins_B[-1]) - np.repeat(begins_B[:-1], attended_B)
    row_begins_A = np.repeat(_begins(num_columns_B)[:-1], attended_B)
    last_column_A = np.repeat(num_columns_B - 1, attended_B)
    inputs = {
        "logit_rows": np.arange(num_columns_B.sum()),
        "attended": row_begins_A + np.minimum(column_A, last_column_A),
        "kept": np.flatnonzero(column_A <= last_column_A),
        "subsequence_begins": begins_B,
    }
    return PassShape(
        np.arange(width) < num_columns_B[:, None],
        attended_B,
        column_A,
        {name: _tensor(each) for name, each in inputs.items()},
    )


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
        *("tokens", "logit_rows", "attended", "kept", "positions", "past_lens"),
        *("subsequence_begins", "block_indices", "block_indices_begins", "max_context_len"),
    )
    inputs = {name: opset15.parameter([-1], np.int32, name) for name in names}
    caches: dict[str, Node] = {}
    longest = opset15.squeeze(inputs["max_context_len"], ints(0))

    def attend(layer: int, queries: Node, keys: Node, values: Node) -> Node:
        pages = [
            opset15.parameter([-1, model.num_kv_heads, BLOCK_SIZE, model.head_size], np.float32)
            for _ in range(2)
        ]
        caches[f"keys{layer}"], caches[f"values{layer}"] = pages
        sequences = [inputs[name] for name in names[5:9]]
        new = [queries, finite_or_zero(keys), finite_or_zero(values)]
        attention = _PagedAttentionExtension(
            [port(each) for each in (*new, *pages, *sequences, *_options(model.head_size, longest))]
        )
        facts = attention.get_rt_info()
        for kind in "kv":
            facts[f"num_{kind}_heads"] = model.num_kv_heads
            facts[f"{kind}_head_size"] = model.head_size
        return rows_of(attention.output(0), inputs["kept"])

    seen = Seen(
        rotation=Rotation(model, engine.max_model_len, inputs["positions"]),
        spread=lambda heads: rows_of(heads, inputs["attended"]),
        attend=attend,
    )
    outputs = build_decoder(model, weights, inputs["tokens"], inputs["logit_rows"], seen)
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
