"""Measures contenders in turn: one batch of each in every repetition."""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ssd.errors import SSDError
from ssd_bench.machine import memory_bytes
from ssd_bench.metrics import Spread
from ssd_bench.peers.contenders import Contender
from ssd_bench.peers.engines import Engine, Setup, engine
from ssd_bench.peers.workers.wire import Batch

QUIET_SECONDS = 0.4
"""Sample of the load of the machine while no contender computes; also the time in which the threads
of the last one stop to wait actively."""
BUSY_CPUS = 0.15
"""Other work on the machine, in CPUs, from which on a measurement is not usable."""


@dataclass(slots=True)
class Row:
    """The measurements of one contender."""

    contender: Contender
    version: str = ""
    load_seconds: float = 0.0
    memory_bytes: int = 0
    tokens_per_second: list[float] = field(default_factory=list)
    """New tokens of whole requests, the prompt's pass included, by repetition."""
    other_cpus: list[float] = field(default_factory=list)
    """CPUs that other work took before each measurement."""
    texts: list[list[list[int]]] = field(default_factory=list)
    """By repetition and prompt."""
    failure: str = ""
    """Why the contender has no more measurements."""

    @property
    def spread(self) -> Spread | None:
        """Median and quartiles of the tokens per second."""
        if not self.tokens_per_second:
            return None
        if len(self.tokens_per_second) == 1:
            return Spread(*self.tokens_per_second * 3)
        q1, median, q3 = statistics.quantiles(self.tokens_per_second, n=4, method="inclusive")
        return Spread(median, q1, q3)

    @property
    def is_usable(self) -> bool:
        """Whether the machine was quiet in most measurements."""
        return bool(self.other_cpus) and statistics.median(self.other_cpus) < BUSY_CPUS


async def measure(
    rows: Sequence[Row],
    setup: Setup,
    batches: Sequence[Batch],
    on_step: Callable[[str], None],
) -> None:
    """Load all contenders, then measure each with each batch; adds to ``rows``.

    A contender that fails keeps its reason, and the others go on.

    Args:
        rows: their measurements of an earlier run are kept; batches that they have are left out.
        setup: what all contenders share.
        batches: one for each repetition.
        on_step: called before each load and measurement, with what follows.
    """
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        ends: dict[str, contextlib.AsyncExitStack] = {}
        for row in rows:
            if row.failure or len(row.tokens_per_second) >= len(batches):
                continue
            name = row.contender.name
            on_step(f"loading {name}")
            before = own_memory()
            started = time.perf_counter()
            ends[name] = await stack.enter_async_context(contextlib.AsyncExitStack())
            async with _failures(row, ends[name]):
                engines[name] = await ends[name].enter_async_context(engine(row.contender, setup))
                await engines[name].complete({**batches[0], "max_tokens": 16})
                row.version = engines[name].version
                row.load_seconds = time.perf_counter() - started
                row.memory_bytes = own_memory() - before
        for repetition, batch in enumerate(batches):
            turn = repetition % len(rows)
            for row in (*rows[turn:], *rows[:turn]):
                if row.failure or len(row.tokens_per_second) > repetition:
                    continue
                on_step(f"{repetition + 1}/{len(batches)} {row.contender.name}")
                async with _failures(row, ends[row.contender.name]):
                    await _one(row, engines[row.contender.name], batch)


def num_steps(rows: Sequence[Row], num_batches: int) -> int:
    """How often ``measure`` calls ``on_step`` if no contender fails."""
    left = [num_batches - len(row.tokens_per_second) for row in rows if not row.failure]
    return sum(1 + each for each in left if each > 0)


async def _one(row: Row, engine: Engine, batch: Batch) -> None:
    other_cpus = await other_work()
    started = time.perf_counter()
    texts = await engine.complete(batch)
    seconds = time.perf_counter() - started
    row.other_cpus.append(other_cpus)
    row.tokens_per_second.append(sum(map(len, texts)) / seconds)
    row.texts.append(texts)


@contextlib.asynccontextmanager
async def _failures(row: Row, end: contextlib.AsyncExitStack) -> AsyncIterator[None]:
    """Note the failure of a contender and end it: it must not compute beside the others."""
    try:
        yield
    except SSDError as error:
        row.failure = str(error)
        await end.aclose()


async def other_work() -> float:
    """Return the CPUs that are in use while this run computes nothing."""
    before = _cpu_ticks()
    await asyncio.sleep(QUIET_SECONDS)
    used, whole = (now - then for now, then in zip(_cpu_ticks(), before, strict=True))
    return used / whole * (os.cpu_count() or 1) if whole else 0.0


def _cpu_ticks() -> tuple[int, int]:
    """Return the time in which the CPUs of the machine computed, and all of it."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle = sum(ticks[3:5])  # idle, and waiting for a disk
    return sum(ticks[:8]) - idle, sum(ticks[:8])


def own_memory() -> int:
    """Return the resident memory of the processes that this one started, and of theirs."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = file.read_text().rpartition(")")[2]
            children.setdefault(int(after_name.split()[1]), []).append(int(file.parent.name))
    found, todo = 0, [*children.get(os.getpid(), [])]
    while todo:
        pid = todo.pop()
        found += memory_bytes(pid)
        todo += children.get(pid, [])
    return found
