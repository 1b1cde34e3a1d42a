"""A target's passes as one graph with paged attention.

The KV storage is the memory of the graph's cache inputs: the attention writes the new entries into
their pages and reads the pages of each sequence, so sequences of different lengths share a pass
without padding. Rows are packed: a pass has as many as its sequences have columns, or a few more
that an earlier pass had.

*Same bits*: the attention has one kernel for sequences of one column and one for sequences of more,
which sum in different orders. In a verify, each row is a sequence of one column: it sees the
entries that the same pass writes for the rows before it. In a prefill, the rows are one sequence of
at least two columns. With fewer sequences than threads, the attention would divide the sums of a
sequence among the threads. An empty sequence in each verify prevents that: with it, the attention
divides only sequences and heads. The plugin computes the matrix products. On CPUs with AVX2, it has
another kernel for one row of quantised weights, and for more than 80 rows of any weights but
float32. Then a pass of one row gets a row of padding, and a pass of more than 64 rows is divided.
``same_bits`` proves at start that rows have the same bits, and selects the limits.

*Fewest rows*: the kernel for one row is not always the fastest. The target measures that at start,
and then also gives passes of one to three rows padding. In bfloat16 with AVX512-BF16 (AMD EPYC, one
core), passes of 1, 2, 3, 4 and 6 rows take 30, 36, 28, 27 and 28 ms (208M weights) and 7.9, 10.0,
7.6, 7.2 and 7.6 ms (50M). In float32 and int8, and with 14M weights, one row is the fastest. The
choice can differ between starts, and the tokens do not: either is proved against passes of more
rows, which both contain.

*Decision*: rows are sequences. *Because*: the kernel for more columns packs all keys and values of
a sequence again in each pass. Embedded target, float32, one core, context 256, against sequences of
K + 1 columns, ms of plain decoding with 1, 8 and 16 sequences: 3.0, 7.7 and 11.3 against 3.3, 9.6
and 15.4; verifies of 7 rows took the same. *Revisit when* contexts are so long that the rows of a
sequence should read its entries together.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from openvino import Node, Shape, Type, opset15
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
from ssd.engine.precision import DTYPES, SMALL_MODEL
from ssd.engine.sizes import pass_weights
from ssd.observability.log import get_logger

_log = get_logger("ssd.engine")

MIN_STORED = 2
"""Smallest number of rows of a prefill."""
ANY = 1 << 20
ROW_LIMITS = ((1, ANY), (1, 64), (2, ANY), (2, 64), (5, 64))
"""Smallest and largest numbers of rows of a pass, in the order in which they are tried. Kernels for
few rows end at one row or at four, and those for many begin at 81. A longer chunk of a prompt is
divided."""
FEW_ROWS = 4
"""Passes of one to three rows get padding to this number if it takes less time than one row."""
LEAST_GAIN = 0.04
"""Share of the time of one row that ``FEW_ROWS`` must save."""
LONG_SECONDS = 0.2
"""Passes that take longer are measured once."""
BLOCK_SIZE = BLOCK_SIZES["openvino"]
BLOCK_STEP = 8
CHANGE_WEIGHTS = 5_500_000
"""A change of the shape takes as long as a row of so many weights a layer: 1.6 ms for 14M weights
in 8 layers, of which a row takes .5 ms (one AVX2 core)."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedPass:
    """The rows of a verify, packed, and where they are in the batch."""

    num_sequences: int
    """Number of sequences that are not padding; they come first."""
    tokens_R: Ints
    positions_R: Ints
    tables_RJ: Ints
    shape: tuple[int, int]
    """Sequences and columns of the batch."""
    is_row_BP: NDArray[np.bool_] | None
    """None where each column of the batch is a row."""
    keeps_rows: bool
    """See ``PagedBatch``."""


class _Rows:
    """The memory that the graph reads and writes in verifies of R rows. The rows are sequences.

    Verifies of one shape write their values in place: after a forward pass, the caches of a CPU
    have neither code nor data of the host, so each call of numpy or torch costs 10 to 50 us.
    """

    def __init__(self, num_rows: int, num_blocks: int, vocab_size: int) -> None:
        # One row more: the empty sequence.
        begins = np.minimum(np.arange(num_rows + 2, dtype=np.int32), num_rows)
        self.tokens_R, self.positions_R = np.zeros((2, num_rows), np.int32)
        self.past_lens = np.zeros(num_rows + 1, np.int32)
        self.tables_RJ = np.zeros((num_rows, num_blocks), np.int32)
        self.longest = np.zeros(1, np.int32)
        self.logits_RV = torch.empty((num_rows, vocab_size))
        self.inputs = {
            "tokens": self.tokens_R,
            "logit_rows": begins[:num_rows],
            "positions": self.positions_R,
            "past_lens": self.past_lens,
            "subsequence_begins": begins,
            "block_indices": self.tables_RJ.reshape(-1),
            "block_indices_begins": begins * num_blocks,
            "max_context_len": self.longest,
        }

    def write(self, tokens_R: Ints, positions_R: Ints, tables_RJ: Ints, last_position: int) -> None:
        """Write the rows of a verify. Missing ones are padding, in the reserved block."""
        count, width = len(tokens_R), min(self.tables_RJ.shape[1], tables_RJ.shape[1])
        if count < len(self.tokens_R):
            for each in (self.tokens_R, self.positions_R, self.past_lens, self.tables_RJ):
                each[count:] = 0
        self.tokens_R[:count] = tokens_R
        self.past_lens[:count] = positions_R
        np.minimum(self.past_lens[:-1], last_position, out=self.positions_R)
        self.tables_RJ[:count, :width] = tables_RJ[:, :width]
        # Blocks beyond the table are the reserved one, also after rows with longer tables.
        self.tables_RJ[:count, width:] = 0
        self.longest[0] = self.past_lens.max() + 1


class OpenVinoTarget:
    """A graph and its KV storage; see ``TargetExecution``."""

    def __init__(self, weights: DecoderWeights, model: ModelConfig, engine: EngineConfig) -> None:
        assert engine.block_size == BLOCK_SIZE, engine.block_size
        self.attention_name = "openvino"
        self.num_parameters = 0
        self.packs_rows = not engine.deterministic
        change_rows = CHANGE_WEIGHTS * model.num_layers // pass_weights(model)
        self._most_padding = min(change_rows, engine.lookahead)
        """Rows of padding that consecutive passes may have together to keep the shape."""
        self._sum_padding = 0
        """Of the newest passes that kept it."""
        self.num_padding = 0
        # From 81 rows on, products with kept weights have another kernel.
        is_kept = engine.weights == "bfloat16"
        self._row_limits = [each for each in ROW_LIMITS if each[1] != ANY or not is_kept]
        self._max_sequences = engine.max_num_seqs
        self.sequence_counts = sequence_buckets(engine)
        self._last_position = engine.max_model_len - 1
        self._vocab_size = model.vocab_size
        self._rows: _Rows | None = None
        """Of the newest pass; None if it was a prefill."""
        self._request, caches = _build(weights, model, engine)
        # After the weights have been packed: the rest of the memory is for the KV cache.
        self.num_blocks = plan_blocks(model, engine)
        shape = (len(caches), self.num_blocks, model.num_kv_heads, BLOCK_SIZE, model.head_size)
        self.storage = torch.zeros(shape, dtype=DTYPES[engine.dtype])
        for name, cache in zip(caches, self.storage, strict=True):
            self._request.set_tensor(name, over(cache))
        # In smaller models, the products are a small part of the pass.
        has_few = engine.max_num_seqs * engine.num_columns >= FEW_ROWS
        if self.packs_rows and has_few and pass_weights(model) >= SMALL_MODEL:
            least = least_rows(self._seconds_of)
            limits = [(max(least, fewest), most) for fewest, most in self._row_limits]
            self._row_limits = list(dict.fromkeys(limits))
            _log.info("least_rows", rows=least)

    @property
    def shapes(self) -> str:
        """See ``TargetExecution.shapes``."""
        if not self.packs_rows:
            return ONE_SHAPE
        least, most = self._row_limits[0]
        limit = "" if most == ANY else f", at most {most}"
        return f"passes of {least} rows or more{limit}"

    def use_fewer_shapes(self) -> str | None:
        """See ``TargetExecution.use_fewer_shapes``."""
        if not self.packs_rows:
            return None
        if len(self._row_limits) > 1:
            self._row_limits.pop(0)
            return self.shapes
        self._row_limits = [ROW_LIMITS[0]]
        self.packs_rows = False
        self.sequence_counts = self.sequence_counts[-1:]
        return self.shapes

    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        tokens_R = batch.tokens_BP[0].numpy()
        if self.packs_rows:
            tokens_R = tokens_R[: int(batch.num_columns_B[0])]
        first, table_J = int(batch.first_positions_B[0]), batch.block_tables_BJ[0].numpy()
        min_rows, max_rows = self._row_limits[0]
        found = []
        for part in _parts(len(tokens_R), max_rows):
            part_R = tokens_R[part]
            # The entries of copies, at the next positions, are overwritten before they are read.
            part_R = np.resize(part_R, max(len(part_R), min_rows, MIN_STORED))
            self._store(part_R, first + part.start, table_J)
            found.append(torch.from_numpy(self._request.get_output_tensor(1).data).isfinite())
        return torch.cat(found)

    def prepare(self, batch: PagedBatch) -> PackedPass:
        """Pack the rows of the batch; at one shape, padding runs as well."""
        num_sequences = len(batch.tokens_BP)
        if not self.packs_rows:
            batch = pad_sequences(batch, self._max_sequences)
        tokens_BP, tables_BJ = batch.tokens_BP.numpy(), batch.block_tables_BJ.numpy()
        num_columns = tokens_BP.shape[1]
        counts_B = batch.num_columns_B.numpy() if self.packs_rows else num_columns
        positions_BP = batch.first_positions_B.numpy()[:, None] + np.arange(num_columns)
        is_row_BP = None
        if not self.packs_rows or counts_B.sum() == tokens_BP.size:
            tokens_R, positions_R = tokens_BP.reshape(-1), positions_BP.reshape(-1)
        else:
            is_row_BP = np.arange(num_columns) < counts_B[:, None]
            tokens_R, positions_R = tokens_BP[is_row_BP], positions_BP[is_row_BP]
        return PackedPass(
            num_sequences,
            tokens_R,
            positions_R,
            tables_BJ.repeat(counts_B, axis=0),
            tokens_BP.shape,
            is_row_BP,
            batch.keeps_rows,
        )

    def verify(self, prepared: PackedPass) -> Tensor:
        """See ``TargetExecution.verify``."""
        self.num_padding = 0
        num_rows, most = len(prepared.tokens_R), self._row_limits[0][1]
        if num_rows <= most:
            logits_RV = self._verify(prepared, slice(0, num_rows))
        else:
            logits_RV = torch.empty((num_rows, self._vocab_size))
            for part in _parts(num_rows, most):
                logits_RV[part] = self._verify(prepared, part)
        if prepared.is_row_BP is None:
            logits_BPV = logits_RV.view(*prepared.shape, -1)
            return logits_BPV[: prepared.num_sequences]
        logits_BPV = torch.empty((*prepared.shape, logits_RV.shape[1]))
        logits_BPV[torch.from_numpy(prepared.is_row_BP)] = logits_RV
        return logits_BPV

    def verify_seconds(self) -> None:
        """See ``TargetExecution.verify_seconds``."""
        return

    def _verify(self, prepared: PackedPass, part: slice) -> Tensor:
        """Run a pass of these rows; their logits are valid until the next one."""
        positions_R = prepared.positions_R[part]
        num_rows = max(len(positions_R), self._row_limits[0][0])
        padding = self._padding(num_rows, keeps_rows=prepared.keeps_rows)
        self.num_padding += padding
        num_rows += padding
        # In steps, so that the shape is the same for many rounds.
        num_blocks = (int(positions_R.max()) // BLOCK_SIZE // BLOCK_STEP + 1) * BLOCK_STEP
        if self._rows is None or self._rows.tables_RJ.shape != (num_rows, num_blocks):
            self._rows = _Rows(num_rows, num_blocks, self._vocab_size)
            self._set(self._rows.inputs)
            self._request.set_output_tensor(0, over(self._rows.logits_RV))
        rows = self._rows
        rows.write(
            prepared.tokens_R[part], positions_R, prepared.tables_RJ[part], self._last_position
        )
        self._request.infer(share_outputs=True)
        return (
            rows.logits_RV if len(positions_R) == num_rows else rows.logits_RV[: len(positions_R)]
        )

    def _padding(self, num_rows: int, *, keeps_rows: bool) -> int:
        """Return how many rows of padding a pass gets so that it has as many as the one before.

        OpenVINO prepares every node again when the number of rows changes. In small models that
        takes as long as a few rows, and a shorter proposal among others costs two changes.
        """
        kept = 0 if self._rows is None else len(self._rows.tokens_R)
        missing = kept - num_rows
        if not (keeps_rows and 0 < missing <= self._most_padding - self._sum_padding):
            self._sum_padding = 0
            return 0
        self._sum_padding += missing
        return missing

    def _store(self, tokens_R: Ints, first: int, table_J: Ints) -> None:
        """Run a pass that stores a part of a text, as one sequence."""
        length = first + len(tokens_R)
        num_blocks = -(-length // BLOCK_SIZE)
        # Blocks beyond the table are the reserved one.
        blocks = np.pad(table_J, (0, max(0, num_blocks - len(table_J))))[:num_blocks]
        values = {
            "tokens": tokens_R,
            "logit_rows": [],
            "positions": np.minimum(np.arange(first, length), self._last_position),
            "past_lens": [first],
            "subsequence_begins": [0, len(tokens_R)],
            "block_indices": blocks,
            "block_indices_begins": [0, num_blocks],
            "max_context_len": [length],
        }
        inputs = {name: np.array(each, dtype=np.int32) for name, each in values.items()}
        self._rows = None
        self._set(inputs)
        self._request.set_output_tensor(0, openvino.Tensor(Type.f32, Shape([0, self._vocab_size])))
        self._request.infer(share_outputs=True)

    def _seconds_of(self, num_rows: int) -> float:
        """Measure a verify of one sequence, in the reserved block."""
        count_B = torch.tensor([num_rows])
        batch = PagedBatch(
            torch.zeros((1, num_rows), dtype=torch.int64),
            torch.zeros_like(count_B),
            count_B,
            torch.zeros((1, 1), dtype=torch.int64),
        )
        prepared = self.prepare(batch)
        began_at = time.perf_counter()
        self.verify(prepared)
        return time.perf_counter() - began_at

    def _set(self, inputs: dict[str, NDArray[np.int32]]) -> None:
        """Let the graph read these arrays, which must live until its pass has ended."""
        for name, values in inputs.items():
            self._request.set_tensor(name, openvino.Tensor(values, shared_memory=True))


def least_rows(seconds_of: Callable[[int], float]) -> int:
    """Return the smallest number of rows that a pass should have: one or ``FEW_ROWS``.

    Args:
        seconds_of: runs and measures a pass of so many rows.
    """
    seconds = dict.fromkeys((1, FEW_ROWS), math.inf)
    for rows in (1, FEW_ROWS) * 3:
        # The first pass of a shape prepares it. Sizes are measured in turn, against disturbances.
        seconds_of(rows)
        seconds[rows] = min(seconds[rows], seconds_of(rows))
        if LONG_SECONDS < max(seconds.values()) < math.inf:
            break
    return FEW_ROWS if seconds[FEW_ROWS] < (1 - LEAST_GAIN) * seconds[1] else 1


def _parts(num_rows: int, most: int) -> list[slice]:
    """Return parts of at most ``most`` rows, of one size if possible."""
    size = -(-num_rows // -(-num_rows // most))
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


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
