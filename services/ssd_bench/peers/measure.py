"""Measures contenders in turn: one batch of each in every repetition."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ssd.errors import SSDError
from ssd_bench.machine import (
    BUSY_CPUS,
    CpuTicks,
    OtherWork,
    memory_bytes,
    other_work,
    own_processes,
    was_quiet,
)
from ssd_bench.metrics import Spread, spread
from ssd_bench.peers.contenders import Contender
from ssd_bench.peers.engines import Engine, Setup, engine
from ssd_bench.peers.workers.wire import Batch
from ssd_bench.prompts import DEMO

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """What contenders are asked for."""

    batch: int = 1
    """Prompts at a time."""
    temperature: float = 0.0
    data: str = DEMO
    """Name of the data set."""


@dataclass(slots=True)
class Row:
    """The measurements of one contender in one case."""

    contender: Contender
    case: Case = Case()
    version: str = ""
    load_seconds: float = 0.0
    memory_bytes: int = 0
    tokens_per_second: list[float] = field(default_factory=list)
    """New tokens of whole requests, the prompt's pass included, by repetition."""
    other_cpus: list[float] = field(default_factory=list)
    """CPUs that other work took before each measurement or during it. During that of a server, only
    what the host took counts."""
    texts: list[list[list[int] | str]] = field(default_factory=list)
    """By repetition and prompt: ids, or text if an engine does not report ids."""
    hits: list[int] = field(default_factory=list)
    looked_up: list[int] = field(default_factory=list)
    """Rounds that needed a table of a draft process, by repetition; the hits are a part."""
    failure: str = ""
    """Why the contender has no more measurements."""

    @property
    def name(self) -> str:
        """Unique, for plots."""
        case = f"{self.case.data}, batch {self.case.batch}, T={self.case.temperature:g}"
        return f"{self.contender.name}, {case}"

    @property
    def spread(self) -> Spread | None:
        """Median and quartiles of the tokens per second."""
        if not self.tokens_per_second:
            return None
        return spread(self.tokens_per_second)

    @property
    def hit_rate(self) -> float | None:
        """Hits / rounds that needed a table, of all repetitions; None without such rounds."""
        looked_up = sum(self.looked_up)
        return sum(self.hits) / looked_up if looked_up else None

    @property
    def is_usable(self) -> bool:
        """Whether the machine was quiet in most measurements."""
        return was_quiet(self.other_cpus)

    def forget_busy(self) -> None:
        """Remove the first measurement on a busy machine, and those after it."""
        num_quiet = len(list(takewhile(lambda cpus: cpus < BUSY_CPUS, self.other_cpus)))
        counts = (self.hits, self.looked_up)
        for measured in (self.tokens_per_second, self.other_cpus, self.texts, *counts):
            del measured[num_quiet:]


async def measure(
    rows: Sequence[Row],
    setup: Setup,
    batches: Mapping[Case, Sequence[Batch]],
    on_step: Callable[[str], None],
) -> None:
    """Load all contenders, then measure each with each batch; adds to ``rows``.

    A contender that fails keeps its reason, and the others go on.

    Args:
        rows: their measurements of an earlier run are kept; batches that they have are left out.
        setup: what all contenders share.
        batches: of each case, one to warm up with, then one for each repetition.
        on_step: called before each load and measurement, with what follows.
    """
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[Contender, Engine] = {}
        ends: dict[Contender, contextlib.AsyncExitStack] = {}
        for contender in dict.fromkeys(row.contender for row in rows if _left(row, batches)):
            own = [row for row in rows if row.contender == contender]
            on_step(f"loading {contender.name}")
            # The memory of this contender in an earlier run, or of the largest contender so far.
            taken = max(row.memory_bytes for row in own) or max(row.memory_bytes for row in rows)
            is_server = contender.drafting == "server"
            if not is_server and (shortage := shortage_of(free_memory(), taken)):
                for row in own:
                    row.failure = shortage
                continue
            before, started = own_memory(), time.perf_counter()
            ends[contender] = await stack.enter_async_context(contextlib.AsyncExitStack())
            async with _failures(own, ends[contender]):
                engines[contender] = await ends[contender].enter_async_context(
                    engine(contender, setup)
                )
                for row in own:
                    await engines[contender].complete(
                        {**batches[row.case][0], "max_tokens": WARM_UP_TOKENS}
                    )
            for row in own:
                row.version = engines[contender].version if contender in engines else ""
                row.load_seconds = time.perf_counter() - started
                row.memory_bytes = own_memory() - before
        for repetition in range(max(map(len, batches.values())) - 1):
            turn = repetition % len(rows)
            for row in (*rows[turn:], *rows[:turn]):
                if row.failure or len(row.tokens_per_second) > repetition:
                    continue
                on_step(f"{repetition + 1}/{len(batches[row.case]) - 1} {row.contender.name}")
                own = [other for other in rows if other.contender == row.contender]
                async with _failures(own, ends[row.contender]):
                    await _one(row, engines[row.contender], batches[row.case][1 + repetition])


def _left(row: Row, batches: Mapping[Case, Sequence[Batch]]) -> int:
    return 0 if row.failure else max(0, len(batches[row.case]) - 1 - len(row.tokens_per_second))


def num_steps(rows: Sequence[Row], batches: Mapping[Case, Sequence[Batch]]) -> int:
    """How often ``measure`` calls ``on_step`` if no contender fails."""
    left = {row.contender for row in rows if _left(row, batches)}
    return len(left) + sum(_left(row, batches) for row in rows)


async def _one(row: Row, engine: Engine, batch: Batch) -> None:
    other_cpus = await other_work()
    others, ticks, started = OtherWork(), CpuTicks.read(), time.perf_counter()
    answer = await engine.complete(batch)
    seconds = time.perf_counter() - started
    # A server that runs already is no process of this run.
    is_server = row.contender.drafting == "server"
    row.other_cpus.append(max(other_cpus, ticks.stolen() if is_server else others.cpus()))
    row.tokens_per_second.append(answer.num_tokens / seconds)
    row.texts.append(list(answer.texts))
    row.hits.append(answer.hits)
    row.looked_up.append(answer.looked_up)


@contextlib.asynccontextmanager
async def _failures(rows: Sequence[Row], end: contextlib.AsyncExitStack) -> AsyncIterator[None]:
    """Note the failure of a contender and end it: it must not compute beside the others."""
    try:
        yield
    except SSDError as error:
        for row in rows:
            row.failure = str(error)
        await end.aclose()


def shortage_of(free: int, taken: int) -> str:
    """Return why a contender is not loaded, if less memory is free than one took.

    All contenders stay loaded. Without memory, the system ends one of them.
    """
    if free >= taken:
        return ""
    gib = f"{free / 2**30:.1f} GiB of memory are free, and a contender took {taken / 2**30:.1f}"
    return f"not loaded: {gib}; measure fewer --dtypes, --methods or --lookaheads at a time"


def free_memory() -> int:
    """Return the memory that is free on this machine, or in this container."""
    # The module imports torch, which this process does not need otherwise.
    from ssd.engine.memory import free_bytes  # noqa: PLC0415

    return free_bytes("cpu")


def own_memory() -> int:
    """Return the resident memory of the processes that this one started, and of theirs."""
    return sum(map(memory_bytes, own_processes()))
