"""Read bandwidth of the machine, memory of processes, size of models."""

import math
import os
import time
from pathlib import Path

import numpy as np
from safetensors import safe_open

BUFFER_BYTES = 512 << 20
PASSES = 5


def read_bandwidth(cpu: int) -> float:
    """Return the read bandwidth of one core, bytes a second: the best pass over 512 MiB."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        words = np.ones(BUFFER_BYTES // 8, dtype=np.int64)
        best = float("inf")
        for _ in range(PASSES):
            started = time.perf_counter()
            np.bitwise_or.reduce(words)
            best = min(best, time.perf_counter() - started)
    finally:
        os.sched_setaffinity(0, allowed)
    return BUFFER_BYTES / best


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
