"""A target's passes as one graph with paged attention.

The KV storage is the memory of the graph's cache inputs: the attention writes the new entries into
their pages and reads the pages of each sequence, so sequences of different lengths share a pass
without padding. Rows are packed: a pass has as many as its sequences have columns, or a few more
that an earlier pass had.

*Same bits*: the attention has one kernel for sequences of one column and one for sequences of more,
which sum in different orders. In a verify, each row is a sequence of one column: it sees the
entries that the same pass writes for the rows before it. The rows of a prompt are one sequence of
at least two columns, alone or in the pass of a verify. Their kernel clears the entries behind them
in their last block, so the row after a prompt cannot be in its pass. With fewer sequences than
threads, the attention would divide the sums of a sequence among the threads. An empty sequence in
each pass prevents that: with it, the attention divides only sequences and heads. The plugin
computes the matrix products. On CPUs with AVX2, it has another kernel for one row of quantised
weights, and for more than 80 rows of any weights but float32. Then a pass of one row gets a row of
padding, a pass of more than 64 rows is divided, and prompts that do not fit beside the rows have
passes of their own. ``same_bits`` proves at start that rows have the same bits, and selects the
limits.

*Fewest rows*: the kernel for one row is not always the fastest. The target measures that at start,
and then also gives passes of one to three rows padding. In bfloat16 with AVX512-BF16 (AMD EPYC, one
core), passes of 1, 2, 3, 4 and 6 rows take 30, 36, 28, 27 and 28 ms (208M weights) and 7.9, 10.0,
7.6, 7.2 and 7.6 ms (50M). In float32 and int8, and with 14M weights, one row is the fastest. The
choice can differ between starts, and the tokens do not: either is proved against passes of more
rows, which both contain. In bfloat16 with AMX, a pass of 49 rows takes longer than one of 52, and
there are other such numbers; see ``fast_rows``.

*Decision*: rows are sequences. *Because*: the kernel for more columns packs all keys and values of
a sequence again in each pass. Embedded target, float32, one core, context 256, against sequences of
K + 1 columns, ms of plain decoding with 1, 8 and 16 sequences: 3.0, 7.7 and 11.3 against 3.3, 9.6
and 15.4; verifies of 7 rows took the same. *Revisit when* contexts are so long that the rows of a
sequence should read its entries together.
"""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import openvino
import torch
from openvino import Node, opset15
from openvino.op import _PagedAttentionExtension
from torch import Tensor

from ssd.engine.batch import PagedBatch, pad_sequences
from ssd.engine.config import EngineConfig, ModelConfig, sequence_buckets
from ssd.engine.execution import ONE_SHAPE, TargetExecution
from ssd.engine.memory import plan_blocks
from ssd.engine.models.weights import DecoderWeights
from ssd.engine.openvino_engine.decoder import (
    PRECISIONS,
    GraphWeights,
    build_decoder,
    compile_graph,
    graph_weights,
    multiplies_by_amx,
)
from ssd.engine.openvino_engine.layers import Rotation, finite_or_zero, ints, port
from ssd.engine.openvino_engine.matrix import over
from ssd.engine.openvino_engine.packed import (
    BLOCK_SIZE,
    NO_ROWS,
    Inputs,
    PackedPass,
    Prompt,
    Rows,
    divided,
    fast_rows,
    inputs_of,
    pack,
    prompt_of,
    prompts_of,
)
from ssd.engine.precision import DTYPES, SMALL_MODEL
from ssd.engine.sizes import pass_weights, sampling_bytes
from ssd.observability.log import get_logger

_log = get_logger("ssd.engine")

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
BLOCK_STEP = 8
CHANGE_WEIGHTS = 5_500_000
"""A change of the shape takes as long as a row of so many weights a layer: 1.6 ms for 14M weights
in 8 layers, of which a row takes .5 ms (one AVX2 core)."""


class OpenVinoTarget(TargetExecution):
    """A graph and its KV storage."""

    def __init__(self, weights: DecoderWeights, model: ModelConfig, engine: EngineConfig) -> None:
        assert engine.block_size == BLOCK_SIZE, engine.block_size
        self.attention_name = "openvino"
        self.packs_rows = self.joins_prompts = not engine.deterministic
        change_rows = CHANGE_WEIGHTS * model.num_layers // pass_weights(model)
        self._most_padding = min(change_rows, engine.lookahead)
        """Rows of padding that consecutive passes may have together to keep the shape."""
        self._sum_padding = 0
        """Rows of padding of the newest passes that kept the shape."""
        # From 81 rows on, products with kept weights have another kernel.
        is_kept = engine.weights == "bfloat16"
        self._row_limits = [limit for limit in ROW_LIMITS if limit[1] != ANY or not is_kept]
        # Measured with one thread; with several, MLPs have another kernel.
        self._pads_rows = engine.threads == 1 and multiplies_by_amx(model, engine)
        self._max_sequences = engine.max_num_seqs
        self.sequence_counts = sequence_buckets(engine)
        self._last_position = engine.max_model_len - 1
        self._vocab_size = model.vocab_size
        self._rows: Rows | None = None
        """Memory of the newest pass; None if it was a prefill."""
        self._weights = graph_weights(model, weights, engine)
        self._request, caches = _build(self._weights, model, engine)
        reserved_bytes = self._weights.num_unpacked_bytes + sampling_bytes(model, engine)
        self.num_blocks = plan_blocks(model, engine, reserved_bytes)
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
    def most_rows(self) -> int:
        """See ``TargetExecution.most_rows``."""
        return self._row_limits[0][1]

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
        self.packs_rows = self.joins_prompts = False
        self.sequence_counts = self.sequence_counts[-1:]
        return self.shapes

    def free_weights(self) -> None:
        """See ``Execution.free_weights``."""
        if self.packs_rows:
            # With a kept proof, no pass may have copied the weights yet.
            self._seconds_of(1)
        self._weights.free_pages()

    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        (prompt,) = prompts_of(batch, packs_rows=self.packs_rows)
        return self._store(prompt)[1]

    def prepare(self, batch: PagedBatch) -> PackedPass:
        """Pack the rows of the batch; at one shape, padding runs as well."""
        num_sequences = len(batch.tokens_BP)
        if not self.packs_rows:
            batch = pad_sequences(batch, self._max_sequences)
        least = self._row_limits[0][0]
        return pack(batch, num_sequences, least, packs_rows=self.packs_rows)

    def verify(self, prepared: PackedPass) -> Tensor:
        """See ``TargetExecution.verify``."""
        self.num_padding = 0
        if prepared.prompts:
            logits_RV = self._verify_and_store(prepared)
        else:
            logits_RV = self._verify_rows(prepared)
        if prepared.is_row_BP is None:
            logits_BPV = logits_RV.view(*prepared.shape, -1)
            return logits_BPV[: prepared.num_sequences]
        logits_BPV = torch.empty((*prepared.is_row_BP.shape, self._vocab_size))
        logits_BPV[torch.from_numpy(prepared.is_row_BP)] = logits_RV
        return logits_BPV

    def _verify_and_store(self, prepared: PackedPass) -> Tensor:
        """Run the rows and as many prompts in one pass as fit, and the others in further passes.

        Returns:
            The logits of the rows and of the last column of each prompt, [R, V].
        """
        logits, finite = list[Tensor](), list[Tensor]()
        for group in divided(prepared.prompts, len(prepared.tokens_R), self.most_rows):
            if not group:
                logits.append(self._verify_rows(prepared))
            elif len(group[0].tokens_R) <= self.most_rows:
                logits.append(self._run(group, prepared))
                finite += self.finite_prompts
            else:
                last_1V, is_finite_P = self._store(group[0])
                logits.append(last_1V)
                finite.append(is_finite_P)
            prepared = NO_ROWS
        self.finite_prompts = finite
        return torch.cat(logits)

    def _verify_rows(self, prepared: PackedPass) -> Tensor:
        """Run the rows in passes of as many as are allowed; returns their logits [R, V]."""
        num_rows = len(prepared.tokens_R)
        if 0 < num_rows <= self.most_rows:
            return self._verify(prepared, slice(0, num_rows))
        logits_RV = torch.empty((num_rows, self._vocab_size))
        for part in _parts(num_rows, self.most_rows):
            logits_RV[part] = self._verify(prepared, part)
        return logits_RV

    def _verify(self, prepared: PackedPass, part: slice) -> Tensor:
        """Run a pass of these rows; their logits are valid until the next one."""
        positions_R = prepared.positions_R[part]
        num_rows = self._rows_of(max(len(positions_R), self._row_limits[0][0]))
        padding = self._padding(num_rows, keeps_rows=prepared.keeps_rows)
        self.num_padding += padding
        num_rows += padding
        # In steps, so that the shape is the same for many rounds.
        num_blocks = (int(positions_R.max()) // BLOCK_SIZE // BLOCK_STEP + 1) * BLOCK_STEP
        if self._rows is None or self._rows.tables_RJ.shape != (num_rows, num_blocks):
            self._rows = Rows(num_rows, num_blocks, self._vocab_size)
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

    def _rows_of(self, num_rows: int) -> int:
        """Return how many rows a pass with so many has."""
        return fast_rows(num_rows) if self._pads_rows else num_rows

    def _padding(self, num_rows: int, *, keeps_rows: bool) -> int:
        """Return how many rows of padding a pass gets so that it has as many as the one before.

        OpenVINO prepares every node again when the number of rows changes. In small models that
        takes as long as a few rows, and a shorter proposal among others costs two changes.
        """
        num_before = 0 if self._rows is None else len(self._rows.tokens_R)
        missing = num_before - num_rows
        if not (keeps_rows and 0 < missing <= self._most_padding - self._sum_padding):
            self._sum_padding = 0
            return 0
        self._sum_padding += missing
        return missing

    def _store(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Store a part of a prompt by passes of its own.

        Returns:
            The logits of its last column, [1, V], and whether each column is finite, bool [P].
        """
        least, most = self._row_limits[0]
        logits, are_finite = list[Tensor](), list[Tensor]()
        for part in _parts(prompt.count, most):
            tokens_R, first = prompt.tokens_R[part], prompt.first + part.start
            logits.append(self._run([prompt_of(tokens_R, first, prompt.table_J, least)]))
            are_finite += self.finite_prompts
        return logits[-1], torch.cat(are_finite)

    def _run(self, prompts: Sequence[Prompt], prepared: PackedPass = NO_ROWS) -> Tensor:
        """Run the rows of a verify and some prompts in one pass.

        Returns:
            The logits of the rows and of the last column of each prompt, [R, V].
        """
        num_rows = len(prepared.tokens_R) + sum(len(prompt.tokens_R) for prompt in prompts)
        padding = self._rows_of(num_rows) - num_rows
        inputs = inputs_of(prepared, prompts, self._last_position, padding)
        logits_RV = torch.empty((len(inputs["logit_rows"]), self._vocab_size))
        self._rows = None
        self._set(inputs)
        self._request.set_output_tensor(0, over(logits_RV))
        self._request.infer(share_outputs=True)
        is_finite_R = torch.from_numpy(self._request.get_output_tensor(1).data).isfinite()
        begins = inputs["subsequence_begins"][len(prepared.tokens_R) + padding :].tolist()
        self.finite_prompts = [
            is_finite_R[begin : begin + prompt.count]
            for begin, prompt in zip(begins, prompts, strict=False)
        ]
        return logits_RV

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

    def _set(self, inputs: Inputs) -> None:
        """Let the graph read these arrays, which must live until its pass has ended."""
        for name, values in inputs.items():
            self._request.set_tensor(name, openvino.Tensor(values, shared_memory=True))


def least_rows(seconds_of: Callable[[int], float]) -> int:
    """Return the smallest number of rows that a pass should have: one or ``FEW_ROWS``.

    ``seconds_of`` runs and measures a pass of so many rows.
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
    if not num_rows:
        return []
    size = -(-num_rows // -(-num_rows // most))
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _build(
    weights: GraphWeights, model: ModelConfig, engine: EngineConfig
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
            [port(node) for node in (*new, *pages, *sequences, *_options(model.head_size, longest))]
        )
        facts = attention.get_rt_info()
        for kind in "kv":
            facts[f"num_{kind}_heads"] = model.num_kv_heads
            facts[f"{kind}_head_size"] = model.head_size
        return attention.output(0)

    rotation = Rotation(model, engine.max_model_len, inputs["positions"])
    tokens, logit_rows = inputs["tokens"], inputs["logit_rows"]
    outputs = build_decoder(model, weights, tokens, logit_rows, rotation, attend)
    (request,) = compile_graph(outputs, inputs | caches, engine)
    weights.release()
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
