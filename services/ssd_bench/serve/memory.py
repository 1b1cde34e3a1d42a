"""Resident memory of processes during a load."""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from ssd.ports import Clock
from ssd_bench.machine import memory_bytes

_INTERVAL_SECONDS = 1.0
MIB = 1 << 20
MIN_SAMPLES = 60
"""In a shorter load, the buffers of new batch sizes look like growth: the embedded draft grew by 78
MiB in 45 s with 64 sessions, and by nothing in the three minutes of the scenario."""
FLAT_SHARE = 0.03
FLAT_BYTES = 16 * MIB
"""Memory is flat if it grows by no more than this share or these bytes, whichever is larger. An
allocator keeps freed memory in pieces, so a process that has no leak still grows a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Resident memory of one process over a load."""

    begin_bytes: float
    """Median of the second quarter: the first one is the start of the load."""
    end_bytes: float
    """Median of the last quarter."""
    peak_bytes: float

    @property
    def growth_bytes(self) -> float:
        """Growth from the second quarter to the last."""
        return self.end_bytes - self.begin_bytes

    @property
    def allowed_growth_bytes(self) -> float:
        """Growth up to which memory counts as flat."""
        return max(FLAT_BYTES, FLAT_SHARE * self.begin_bytes)


@dataclass(slots=True)
class MemoryLog:
    """Samples of the memory of processes, one a second."""

    taken_at: list[float] = field(default_factory=list)
    num_bytes: dict[str, list[int]] = field(default_factory=dict)
    """By the name of the process, one for each time."""

    def extend(self, later: "MemoryLog") -> None:
        """Add the samples of a later load on the same processes."""
        self.taken_at += later.taken_at
        for name, found in later.num_bytes.items():
            self.num_bytes.setdefault(name, []).extend(found)

    def figures(self) -> dict[str, MemoryFigures]:
        """Return the figures of each process; none of a load that is too short."""
        return {
            name: memory_figures(found)
            for name, found in self.num_bytes.items()
            if len(found) >= MIN_SAMPLES
        }


def memory_figures(num_bytes: list[int]) -> MemoryFigures:
    """Return the figures of at least 4 samples at equal intervals."""
    quarter = len(num_bytes) // 4
    return MemoryFigures(
        begin_bytes=statistics.median(num_bytes[quarter : 2 * quarter]),
        end_bytes=statistics.median(num_bytes[-quarter:]),
        peak_bytes=max(num_bytes),
    )


@contextlib.asynccontextmanager
async def recorded_memory(pids: Mapping[str, int], clock: Clock) -> AsyncIterator[MemoryLog]:
    """Record the memory of processes, by name, while the context is entered."""
    log = MemoryLog(num_bytes={name: [] for name in pids})

    def take() -> None:
        log.taken_at.append(clock.now())
        for name, pid in pids.items():
            log.num_bytes[name].append(memory_bytes(pid))

    async def record() -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            take()

    take()
    recording = asyncio.create_task(record())
    try:
        yield log
    finally:
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
