"""The time of work on a device."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from ssd_bench.gpu_check.outcome import Environment

WARM_UP_RUNS = 3
RUNS = {"cuda": 20, "cpu": 3}


def device_seconds(work: Callable[[], object], environment: Environment) -> float:
    """Return the median time of a run, from its start on the host to its end on the device."""
    for _ in range(WARM_UP_RUNS):
        work()
    times = []
    for _ in range(RUNS[environment.device]):
        _synchronize(environment)
        started = perf_counter()
        work()
        _synchronize(environment)
        times.append(perf_counter() - started)
    return median(times)


def _synchronize(environment: Environment) -> None:
    if environment.is_cuda:
        torch.cuda.synchronize()
