"""Read bandwidth of the machine, memory of processes, size of models."""

import math
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors import safe_open

BUFFER_BYTES = 512 << 20
PASSES = 5


def read_bandwidth(cpus: Collection[int]) -> float:
    """Return the read bandwidth of these CPUs together, bytes a second.

    A thread on each reads 512 MiB of its own several times, all at once; the best pass counts.
    """
    seconds = [[0.0] * len(cpus) for _ in range(PASSES)]
    start = threading.Barrier(len(cpus))

    def read(index: int, cpu: int) -> None:
        # Of this thread, whose memory is then on its node.
        os.sched_setaffinity(0, {cpu})
        words = np.ones(BUFFER_BYTES // 8, dtype=np.int64)
        for part in seconds:
            start.wait()
            started = time.perf_counter()
            words.max()
            part[index] = time.perf_counter() - started

    threads = [threading.Thread(target=read, args=each) for each in enumerate(cpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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


def count_weights(folder: Path) -> int:
    """Return the number of weights in the safetensors files of a folder."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as tensors:
            total += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118 - no dict
    return total
