"""The proof at start that the bits of a row do not depend on the pass that computes it.

Kernels sum in orders that depend on the CPU, the data type and the number of rows, and no rule
predicts where they differ. So each engine runs the passes that it will run, with its own weights:
every column alone and among K+1, proposals of each length, numbers of sequences, proposals of
different lengths together, and the chunks of a prompt together and one by one, up to as many as one
pass stores. The warm-up consists of these passes. Where a verify can store prompts too, rows and
prompts must have the same bits alone and together; else they stay apart.

*Decision*: equal bits on one text of a few tokens. *Because*: a kernel that sums in another order
changes almost every logit, since thousands of sums contribute to each (the tests prove that a
known difference is found). *Not chosen*: a list of CPUs, types and shapes; packed bfloat16 products
of torch had other bits from 33 rows on, on one kind of CPU. *Revisit when* a text differs on a
machine that passed.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssd.engine.batch import PagedBatch, joined
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.observability.log import get_logger
from ssd.settings import cache_folder

_log = get_logger("ssd.engine")

CPU_INFO = Path("/proc/cpuinfo")
_ENGINE = Path(__file__).parent
LONG_SECONDS = 2.0
"""The result of a proof that takes longer is kept."""
NUM_CHUNKS = 2
"""Whole chunks of the prompt that precedes the compared rows."""
_STRIDE = 7919


class Passes(Protocol):
    """The parts of ``TargetRunner`` that a proof runs."""

    model: ModelConfig
    engine: EngineConfig
    num_blocks: int

    @property
    def verify_columns(self) -> tuple[int, ...]:
        """Column counts that a verify can have, ascending."""

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows of a sequence that a verify can have."""

    def forward(self, batch: PagedBatch) -> Tensor:
        """Verify a batch; returns logits [B, P, V]."""

    def prefill(self, batch: PagedBatch) -> int | None:
        """Store consecutive chunks of one prompt."""


def proved(
    folder: Path, engine: EngineConfig, num_blocks: int, shapes: str, find: Callable[[], str | None]
) -> str | None:
    """Return the result of ``find``, from a file if it took long on this machine before.

    ``shapes`` is what the shapes that are used have in common. With fewer KV blocks, the texts of
    the proof are shorter.
    """
    key = {
        "cpu": sorted(name for name, has in torch.cpu.get_capabilities().items() if has),
        "model": _first_processor(CPU_INFO.read_text()),
        "versions": [version(name) for name in ("torch", "openvino")],
        "code": [path.read_text() for path in sorted(_ENGINE.rglob("*.py"))],
        "weights": weights_fingerprint(folder),
        "cpus": sorted(os.sched_getaffinity(0)),
        "engine": repr(replace(engine, engine_reason="", dtype_reason="", kv_cache_bytes=None)),
        "shapes": shapes,
        "blocks": min(num_blocks, _most_blocks(engine)),
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    try:
        cache = cache_folder()
    except RuntimeError as error:
        _log.info("proof_not_kept", reason=str(error))
        return find()
    path = cache / "same_bits" / digest
    with suppress(OSError, ValueError, LookupError, TypeError):
        # No file, a part of one, or a home that this user cannot read, as in a container.
        earlier: str | None = json.loads(path.read_text())["difference"]
        return earlier
    started_at = time.perf_counter()
    difference = find()
    if time.perf_counter() - started_at > LONG_SECONDS:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"difference": difference}))
        except OSError as error:
            _log.info("proof_not_kept", reason=str(error))
    return difference


def _most_blocks(engine: EngineConfig) -> int:
    """Return the number of KV blocks with which the texts of a proof have their full lengths."""
    sizes = [NUM_CHUNKS * engine.prefill_chunk + 1] * 3
    sizes.append(max(engine.step_tokens, engine.prefill_chunk))
    blocks = (-(-(size + engine.num_columns) // engine.block_size) for size in sizes)
    return 1 + sum(blocks)


def _first_processor(text: str) -> list[str]:
    """Return the lines of the first processor without those that differ between processors."""
    lines = text.split("\n\n", 1)[0].splitlines()
    own = ("processor", "apicid", "initial apicid", "core id", "physical id", "cpu MHz", "bogomips")
    return [line for line in lines if line.split("\t")[0].strip(" :") not in own]


def find_difference(
    passes: Passes, sequence_counts: Sequence[int], on_progress: Callable[[float], None]
) -> str | None:
    """Return the first pass in which a row has other bits than alone in its shape, or None.

    Args:
        passes: no sequence exists yet, so its blocks are free.
        sequence_counts: numbers of sequences that are shapes of their own, ascending.
        on_progress: called with 0..1, by the number of rows.
    """
    text = _Text(passes, NUM_CHUNKS, 1)
    wide_PV = text.reference()
    comparisons = list(_comparisons(text, passes, sequence_counts))
    total = sum(rows for _, rows, _ in comparisons)
    done, difference = 0, None
    for name, rows, run in comparisons:
        if not run(wide_PV) and difference is None:
            difference = name
            if 1 in passes.row_counts:
                break
            # The passes after a difference run too: they prepare their shapes.
        done += rows
        on_progress(done / total)
    return difference


def find_joined_difference(passes: Passes, on_progress: Callable[[float], None]) -> str | None:
    """Return a pass whose rows, or the prompts that it stores too, have other bits, or None.

    No sequence exists yet, and ``find_difference`` has found none. ``on_progress`` is called with
    0..1.
    """
    text = _Text(passes, NUM_CHUNKS, 1)
    first = _Text(passes, NUM_CHUNKS, 1, text.end)
    prompts = [first, _Text(passes, NUM_CHUNKS, 1, first.end)]
    if not text.num_chunks or any(prompt.num_chunks != text.num_chunks for prompt in prompts):
        return "too few blocks for a proof"
    # As many tokens as one step stores, in the blocks of the other prompts.
    large = _Text(passes, max(1, passes.engine.step_tokens // text.chunk), 0, text.end)
    expected, expected_large = text.expected(), large.expected()
    most = [text.columns] * passes.engine.max_num_seqs
    cases = [
        (sizes, prompts, chunks, expected)
        for sizes in ([], [1], [text.columns], most)
        for chunks in (1, text.num_chunks + 1)
    ]
    cases.append((most, [large], large.num_chunks, expected_large))
    for done, (sizes, texts, chunks, (prompt_PV, last_V)) in enumerate(cases, start=1):
        name = f"{len(sizes)} x {max(sizes, default=0)} rows and {len(texts)} prompts"
        logits_BPV = torch.empty(0)
        for parts in zip(*(prompt.parts(chunks) for prompt in texts), strict=True):
            logits_BPV = text.run(sizes, 0, parts)
            rows = zip(logits_BPV, sizes, strict=False)
            if not all(torch.equal(row_PV[:size], expected[0][:size]) for row_PV, size in rows):
                return f"rows of {name}"
        if not all(torch.equal(logits_V, last_V) for logits_V in logits_BPV[len(sizes) :, 0]):
            return f"first tokens of {name}"
        if not all(prompt.has_same([prompt.columns], 0, prompt_PV) for prompt in texts):
            return f"entries of {name}"
        on_progress(done / len(cases))
    return None


Comparison = tuple[str, int, Callable[[Tensor], bool]]
"""A name, a number of rows, and whether the rows have the bits of these logits [P, V]."""


def _comparisons(text: "_Text", passes: Passes, counts: Sequence[int]) -> Iterator[Comparison]:
    columns, row_counts = text.columns, passes.row_counts
    if 1 in row_counts:
        yield from _comparison_of_a_step(text, passes)
    if text.num_chunks:
        yield "a prompt in chunks", text.num_chunks * text.chunk, text.has_same_after_chunks
    for column in range(columns):
        rest = columns - column
        yield f"column {column} first", rest, partial(text.has_same, [rest], column)
        if 1 in row_counts:
            yield f"column {column} alone", 1, partial(text.has_same, [1], column)
    for rows in row_counts[:-1]:
        yield f"{rows} columns", rows, partial(text.has_same, [rows], 0)
    for count in reversed(counts):
        for rows in sorted({1, columns} & set(row_counts)):
            same = partial(text.has_same, [rows] * count, columns - rows)
            yield f"{count} x {rows} rows", count * rows, same
    if 1 in row_counts:
        for total in mixed_totals(columns, counts[-1] * columns):
            sizes = [columns] * (total // columns) + [total % columns] * (total % columns > 0)
            yield f"{total} rows of proposals", total, partial(text.has_same, sizes, 0)


def _comparison_of_a_step(text: "_Text", passes: Passes) -> Iterator[Comparison]:
    """Compare prefills of up to ``step_tokens`` rows, which can have kernels of their own."""
    step = _Text(passes, passes.engine.step_tokens // text.chunk, 0)

    def has_same(_wide_PV: Tensor) -> bool:
        is_same = step.has_same_in_parts()
        # The prompts have the same blocks.
        text.store(text.num_chunks + 1)
        return is_same

    if step.num_chunks > text.num_chunks:
        yield "a prompt of one step", 2 * step.num_chunks * step.chunk, has_same


def mixed_totals(columns: int, most: int) -> list[int]:
    """Return numbers of rows that proposals of different lengths can have together, up to ``most``.

    Kernels divide rows into blocks of powers of two: each range between two of them has the first
    number and one in its middle.
    """
    starts = [1 << power for power in range(most.bit_length())]
    totals = {total for start in starts for total in (start + 1, start + start // 2 - 1)}
    return sorted(total for total in totals if columns < total < most)


class _Text:
    """A text in some blocks: a prompt of whole chunks and some tokens, then P columns."""

    def __init__(
        self, passes: Passes, most_chunks: int, num_more: int, first_block: int = 1
    ) -> None:
        """Construct; its blocks are consecutive.

        The prompt has up to ``most_chunks`` whole chunks, if there is room for them. With a chunk,
        it has ``num_more`` further tokens: one token alone in its chunk differs most from one in a
        pass of all chunks.
        """
        engine = passes.engine
        self._passes = passes
        self.columns = engine.num_columns
        self.chunk = engine.prefill_chunk
        room = min(engine.max_model_len, (passes.num_blocks - first_block) * engine.block_size)
        self.num_chunks = max(0, min(most_chunks, (room - self.columns - num_more) // self.chunk))
        self._length = self.num_chunks * self.chunk + (num_more if self.num_chunks else 0)
        size = self._length + self.columns
        self._tokens_S = torch.arange(1, 1 + size) * _STRIDE % self._num_ids
        self.end = first_block - (-size // engine.block_size)
        """The block after its last one."""
        self._blocks_J = torch.arange(first_block, self.end)

    @property
    def _num_ids(self) -> int:
        num_ids = self._passes.engine.num_token_ids
        return self._passes.model.vocab_size if num_ids is None else num_ids

    def store(self, chunks_a_pass: int, first_chunk: int = 0) -> None:
        """Store the prompt from a chunk on, with prefills of so many chunks."""
        for part in self.parts(chunks_a_pass, first_chunk):
            self._passes.prefill(part)

    def parts(self, chunks_a_pass: int, first_chunk: int = 0) -> Iterator[PagedBatch]:
        """Return the prompt from a chunk on, in parts of so many chunks."""
        tokens_1S = pad(self._tokens_S[None, : self._length], (0, -self._length % self.chunk))
        width = chunks_a_pass * self.chunk
        for first in range(first_chunk * self.chunk, self._length, max(1, width)):
            yield PagedBatch(
                tokens_1S[:, first : first + width],
                torch.tensor([first]),
                torch.tensor([min(width, self._length - first)]),
                self._blocks_J[None],
            )

    def reference(self) -> Tensor:
        """Store the prompt in one pass; returns the logits of the columns, [P, V]."""
        self.store(self.num_chunks + 1)
        return self.run([self.columns], 0)[0]

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the logits of the columns, [P, V], and of the end of the prompt alone, [V]."""
        wide_PV = self.reference()
        return wide_PV, self.run([], 0, list(self.parts(self.num_chunks + 1)))[0, 0]

    def has_same_after_chunks(self, wide_PV: Tensor) -> bool:
        """Return whether the columns have these logits after chunks that are stored one by one."""
        self.store(1)
        return self.has_same([self.columns], 0, wide_PV)

    def has_same_in_parts(self) -> bool:
        """Return whether passes over the last half, quarter... change no logits of the columns.

        Their rows are first stored with the whole prompt.
        """
        self.store(self.num_chunks)
        wide_PV, size = self.run([self.columns], 0)[0], self.num_chunks // 2
        while size:
            self.store(size, self.num_chunks - size)
            if not self.has_same([self.columns], 0, wide_PV):
                return False
            size //= 2
        return True

    def has_same(self, sizes: Sequence[int], first: int, wide_PV: Tensor) -> bool:
        """Return whether ``run`` computes these logits."""
        pairs = zip(self.run(sizes, first), sizes, strict=True)
        return all(
            torch.equal(copy_PV[:size], wide_PV[first : first + size]) for copy_PV, size in pairs
        )

    def run(self, sizes: Sequence[int], first: int, prompts: Sequence[PagedBatch] = ()) -> Tensor:
        """Return the logits of so many columns of copies, from ``first`` on, [B, max(sizes), V].

        The pass also stores ``prompts``, of which each has one sequence, and returns the logits of
        their last columns in further rows.
        """
        most, count = max(sizes, default=1), len(sizes)
        width = next(columns for columns in self._passes.verify_columns if columns >= most)
        tokens_P = torch.zeros(width, dtype=torch.int64)
        tokens_P[:most] = self._tokens_S[self._length + first : self._length + first + most]
        batch = PagedBatch(
            tokens_P.expand(count, -1),
            torch.full((count,), self._length + first),
            torch.tensor(sizes, dtype=torch.int64),
            self._blocks_J.expand(count, -1),
            prompts=joined(prompts) if prompts else None,
        )
        return self._passes.forward(batch)[:, :most]
