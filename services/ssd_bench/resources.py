"""Memory, threads and file descriptors of processes during a load: what grows, leaks."""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ssd.tasks import beside
from ssd_bench.machine import memory_bytes

INTERVAL_SECONDS = 1.0
MIN_SAMPLES = 50
"""In a shorter load, the buffers of new batch sizes look like growth: the embedded draft grew by 78
MiB in 45 s with 64 sessions, and by nothing in three minutes."""
MIB = 1 << 20
FLAT_SHARE = 0.03
FLAT = {"memory_bytes": 16.0 * MIB, "threads": 2.0, "descriptors": 8.0}
"""A resource is flat if it grows by no more than ``FLAT_SHARE`` or this number, whichever is
larger. An allocator keeps freed memory in pieces, and connections of clients come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A resource of one process over a load."""

    process: str
    resource: str
    begin: float
    """Median of the second quarter: the first one is the start of the load."""
    end: float
    """Median of the last quarter."""
    peak: float

    def __str__(self) -> str:
        unit = MIB if self.resource == "memory_bytes" else 1
        name = self.resource.replace("_bytes", ", MiB,")
        return (
            f"{name} of {self.process} grew from {self.begin / unit:.0f} to {self.end / unit:.0f}"
        )

    @property
    def is_flat(self) -> bool:
        """Whether its growth is within the bounds above."""
        return self.end - self.begin <= max(FLAT[self.resource], FLAT_SHARE * self.begin)


def read_resources(pid: int) -> dict[str, int]:
    """Return what a process has; 0 of each if it has ended."""
    place, counts = Path(f"/proc/{pid}"), {"threads": 0, "descriptors": 0}
    for name, folder in (("threads", "task"), ("descriptors", "fd")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            counts[name] = len(list((place / folder).iterdir()))
    return {"memory_bytes": memory_bytes(pid), **counts}


@dataclass(slots=True)
class ResourceLog:
    """Samples of processes, one a second."""

    pids: Mapping[str, int]
    """Ids of the processes by their names."""
    samples: dict[float, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Resources by time (seconds since 1970, as in the reports of clients), process and name."""

    def take(self) -> None:
        """Add a sample."""
        now = datetime.now(UTC).timestamp()
        self.samples[now] = {name: read_resources(pid) for name, pid in self.pids.items()}

    def growth(self, begun_at: float, ended_at: float) -> list[Growth]:
        """Return each resource of each process over a load; nothing if it was too short."""
        during = [sample for time, sample in self.samples.items() if begun_at <= time < ended_at]
        if len(during) < MIN_SAMPLES:
            return []
        return [
            growth(process, resource, [sample[process][resource] for sample in during])
            for process in self.pids
            for resource in FLAT
        ]


def growth(process: str, resource: str, samples: Sequence[int]) -> Growth:
    """Return the growth over at least 4 samples at equal intervals."""
    quarter = len(samples) // 4
    return Growth(
        process=process,
        resource=resource,
        begin=statistics.median(samples[quarter : 2 * quarter]),
        end=statistics.median(samples[-quarter:]),
        peak=max(samples),
    )


@contextlib.asynccontextmanager
async def recorded(pids: Mapping[str, int]) -> AsyncIterator[ResourceLog]:
    """Record processes of this machine, by name, while the context is entered."""
    log = ResourceLog(pids)

    async def record() -> None:
        while True:
            log.take()
            await asyncio.sleep(INTERVAL_SECONDS)

    async with beside(record()):
        yield log
