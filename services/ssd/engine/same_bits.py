"""The proof at start that the bits of a row do not depend on the pass that computes it.

Kernels sum in orders that depend on the CPU, the data type and the number of rows, and no rule
predicts where they differ. So each engine runs the passes that it will run, with its own weights:
every column alone and among K+1, proposals of each length, every number of sequences, and the
chunks of a prompt together and one by one. The warm-up consists of these passes.

*Decision*: equal bits on one text of a few tokens. *Because*: a kernel that sums in another order
changes almost every logit, since thousands of sums contribute to each (the tests prove that a
known difference is found). *Not chosen*: a list of CPUs, types and shapes; packed bfloat16 products
of torch had other bits from 33 rows on, on one kind of CPU. *Revisit when* a text differs on a
machine that passed.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")

CPU_INFO = Path("/proc/cpuinfo")
LONG_SECONDS = 2.0
"""The result of a proof that takes longer is kept."""
NUM_CHUNKS = 2
"""Chunks of the prompt that precedes the compared rows."""
_STRIDE = 7919


class Passes(Protocol):
    """The parts of ``TargetRunner`` that a proof runs."""

    model: ModelConfig
    engine: EngineConfig
    num_blocks: int

    @property
    def verify_columns(self) -> tuple[int, ...]:
        """Column counts that a verify can have, ascending."""
        ...

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows of a sequence that a verify can have."""
        ...

    def forward(self, batch: PagedBatch) -> Tensor:
        """Verify a batch; returns logits [B, P, V]."""
        ...

    def prefill(self, batch: PagedBatch) -> int | None:
        """Store consecutive chunks of one prompt."""
        ...


def proved(folder: Path, engine: EngineConfig, find: Callable[[], str | None]) -> str | None:
    """Return the result of ``find``, from a file if it took long on this machine before.

    Args:
        folder: of the model.
        engine: fixes all shapes.
        find: a call of ``find_difference``.
    """
    key = {
        "cpu": sorted(name for name, has in torch.cpu.get_capabilities().items() if has),
        "model": [line for line in CPU_INFO.read_text().splitlines() if "model" in line][:2],
        "versions": [version(name) for name in ("torch", "openvino")],
        "weights": weights_fingerprint(folder),
        "engine": repr(replace(engine, engine_reason="", dtype_reason="", kv_cache_bytes=None)),
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path = Path.home() / ".cache" / "ssd" / "same_bits" / digest
    with suppress(OSError):
        # No file, or a home that this user cannot read, as in a container.
        return path.read_text() or None
    started_at = time.perf_counter()
    difference = find()
    if time.perf_counter() - started_at > LONG_SECONDS:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(difference or "")
        except OSError as error:
            _log.info("proof_not_kept", reason=str(error))
    return difference


def find_difference(
    passes: Passes, sequence_counts: Sequence[int], on_progress: Callable[[float], None]
) -> str | None:
    """Return the first pass in which a row has other bits than alone in its shape, or None.

    Args:
        passes: no sequence exists yet, so its blocks are free.
        sequence_counts: numbers of sequences that are shapes of their own, ascending.
        on_progress: called with 0..1, by the number of rows.
    """
    text = _Text(passes)
    text.store(text.num_chunks)
    wide_PV = text.verify(1, 0, text.columns)[0]
    comparisons = list(_comparisons(text, passes, sequence_counts))
    total = sum(rows for _, rows, _ in comparisons)
    done, difference = 0, None
    for name, rows, run in comparisons:
        # The passes after a difference run too: they prepare their shapes.
        if not run(wide_PV) and difference is None:
            difference = name
        done += rows
        on_progress(done / total)
    return difference


Comparison = tuple[str, int, Callable[[Tensor], bool]]
"""A name, a number of rows, and whether the rows have the bits of these logits [P, V]."""


def _comparisons(text: "_Text", passes: Passes, counts: Sequence[int]) -> Iterator[Comparison]:
    columns = text.columns

    def same(count: int, first: int, last: int) -> Callable[[Tensor], bool]:
        def run(wide_PV: Tensor) -> bool:
            found_BPV = text.verify(count, first, last)
            return torch.equal(found_BPV, wide_PV[first:last].expand_as(found_BPV))

        return run

    if text.num_chunks > 1:

        def chunks(wide_PV: Tensor) -> bool:
            text.store(1)
            return torch.equal(text.verify(1, 0, columns)[0], wide_PV)

        yield "a prompt in chunks", text.num_chunks * text.chunk, chunks
    for column in range(columns):
        yield f"column {column} first", columns - column, same(1, column, columns)
        if 1 in passes.row_counts:
            yield f"column {column} alone", 1, same(1, column, column + 1)
    for rows in passes.row_counts[:-1]:
        yield f"{rows} columns", rows, same(1, 0, rows)
    for count in counts:
        for rows in sorted({1, columns} & set(passes.row_counts)):
            yield f"{count} x {rows} rows", count * rows, same(count, columns - rows, columns)


class _Text:
    """A text in the first blocks: a prompt of whole chunks, then P columns."""

    def __init__(self, passes: Passes) -> None:
        engine = passes.engine
        self._passes = passes
        self.columns = engine.num_columns
        self.chunk = engine.prefill_chunk
        room = min(engine.max_model_len, (passes.num_blocks - 1) * engine.block_size)
        self.num_chunks = max(0, min(NUM_CHUNKS, (room - self.columns) // self.chunk))
        self._length = self.num_chunks * self.chunk
        size = self._length + self.columns
        self._tokens_S = torch.arange(1, 1 + size) * _STRIDE % self._num_ids
        self._blocks_J = torch.arange(1, 1 - (-size // engine.block_size))

    @property
    def _num_ids(self) -> int:
        num_ids = self._passes.engine.num_token_ids
        return self._passes.model.vocab_size if num_ids is None else num_ids

    def store(self, chunks_a_pass: int) -> None:
        """Store the prompt with prefills of so many chunks."""
        width = chunks_a_pass * self.chunk
        for first in range(0, self._length, max(1, width)):
            self._passes.prefill(
                PagedBatch(
                    self._tokens_S[None, first : first + width],
                    torch.tensor([first]),
                    torch.tensor([width]),
                    self._blocks_J[None],
                )
            )

    def verify(self, count: int, first: int, last: int) -> Tensor:
        """Return the logits of columns first..last-1 of ``count`` copies, [B, last-first, V]."""
        width = next(each for each in self._passes.verify_columns if each >= last - first)
        tokens_P = torch.zeros(width, dtype=torch.int64)
        tokens_P[: last - first] = self._tokens_S[self._length + first : self._length + last]
        first_B = torch.full((count,), self._length + first)
        batch = PagedBatch(
            tokens_P.expand(count, -1),
            first_B,
            torch.full_like(first_B, last - first),
            self._blocks_J.expand(count, -1),
        )
        return self._passes.forward(batch)[:, : last - first]
