"""Other work on the machine, its read bandwidth, memory of processes."""

import asyncio
import contextlib
import os
import platform
import statistics
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

PROC = Path("/proc")
BUFFER_BYTES = 512 << 20
PASSES = 5
SAMPLE_SECONDS = 0.4
"""Duration of a sample of the other work, while no contender computes."""
SETTLE_SAMPLES = 15
"""Before a measurement: processes that have just computed stop to wait actively. Those of vLLM do
so for some seconds."""
BUSY_CPUS = 0.15
"""Other work on the machine, in CPUs, from which on a measurement is not usable."""


class CpuTicks(NamedTuple):
    """Times of all CPUs since the start of the machine, from ``/proc/stat``."""

    used: int
    """Ticks in which the CPUs computed, or other machines of the host did (stolen time)."""
    stolen_ticks: int
    whole: int

    @classmethod
    def read(cls) -> Self:
        """Return the times until now."""
        ticks = [int(tick) for tick in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
        idle = sum(ticks[3:5])  # idle, and waiting for a disk
        return cls(sum(ticks[:8]) - idle, ticks[7], sum(ticks[:8]))

    def busy(self) -> float:
        """Return the CPUs that have been in use since this reading."""
        now = self.read()
        return _cpus(now.used - self.used, now.whole - self.whole)

    def stolen(self) -> float:
        """Return the CPUs that the host has taken from this machine since this reading."""
        now = self.read()
        return _cpus(now.stolen_ticks - self.stolen_ticks, now.whole - self.whole)


class OtherWork:
    """CPU time of the host and of processes that this run has not started.

    A process without a parent that ends meanwhile counts as other work with its whole time.
    """

    def __init__(self) -> None:
        """Begin."""
        self._own_ticks = _ticks(own_processes())
        self._all = CpuTicks.read()

    def cpus(self) -> float:
        """Return the CPUs that other work has used since the beginning."""
        now, own = CpuTicks.read(), own_processes()
        # Each process has whole ticks, so one of them can be missing.
        own_ticks = _ticks(own) - self._own_ticks + len(own)
        others = now.used - self._all.used - own_ticks
        return _cpus(max(0, others), now.whole - self._all.whole)


def own_processes() -> dict[int, str]:
    """Return ``stat`` of the processes that this one started, and of theirs, by their ids.

    A process whose parent has ended counts by its session, if one of them leads it.
    """
    stats: dict[int, str] = {}
    members: dict[int, set[int]] = {}
    for file in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, stat = int(file.parent.name), file.read_text()
            stats[pid] = stat
            parent, _, session = _fields(stat)[1:4]
            for leader in (parent, session):
                members.setdefault(int(leader), set()).add(pid)
    own: set[int] = {os.getpid()}
    todo = [*own]
    while todo:
        new = members.get(todo.pop(), set()) - own
        own |= new
        todo += new
    return {pid: stats[pid] for pid in own - {os.getpid()}}


def _ticks(processes: Mapping[int, str]) -> int:
    """Return the ticks of this process and of ``processes``, with their ended children."""
    stats = [(PROC / "self" / "stat").read_text(), *processes.values()]
    return sum(int(ticks) for stat in stats for ticks in _fields(stat)[11:15])


def _fields(stat: str) -> list[str]:
    """Return the fields from the state on: the name before it can have blanks."""
    return stat.rpartition(")")[2].split()


def _cpus(ticks: int, whole: int) -> float:
    return ticks / whole * (os.cpu_count() or 1) if whole else 0.0


async def other_work() -> float:
    """Return the CPUs that are in use while this run computes nothing.

    Waits until they are few, for at most ``SETTLE_SAMPLES`` more samples.
    """
    cpus = float("inf")
    for _ in range(1 + SETTLE_SAMPLES):
        before = CpuTicks.read()
        await asyncio.sleep(SAMPLE_SECONDS)
        cpus = before.busy()
        if cpus < BUSY_CPUS:
            break
    return cpus


def was_quiet(other_cpus: Sequence[float]) -> bool:
    """Return whether other work left the CPUs alone in most measurements."""
    return bool(other_cpus) and statistics.median(other_cpus) < BUSY_CPUS


def machine() -> str:
    """Return the processor and its number of CPUs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def read_bandwidth(cpus: Collection[int]) -> float:
    """Return the read bandwidth of these CPUs together, bytes a second.

    A thread on each reads 512 MiB of its own several times, all at once; the best pass counts.
    """
    seconds = [[0.0] * len(cpus) for _ in range(PASSES)]
    start = threading.Barrier(len(cpus))

    def read(index: int, cpu: int) -> None:
        # Binds this thread to the CPU, so its memory is on the node of the CPU.
        os.sched_setaffinity(0, {cpu})
        words = np.ones(BUFFER_BYTES // 8, dtype=np.int64)
        for part in seconds:
            start.wait()
            started = time.perf_counter()
            words.max()
            part[index] = time.perf_counter() - started

    with ThreadPoolExecutor(len(cpus)) as threads:
        list(threads.map(read, range(len(cpus)), cpus))
    return len(cpus) * BUFFER_BYTES / min(map(max, seconds))


def peak_memory_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
