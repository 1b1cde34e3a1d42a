"""The time of work on a device."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from ssd_bench.gpu_check.outcome import Environment

WARM_UP_RUNS = 3
RUNS = {"cuda": 20, "cpu": 3}


def device_seconds(
    work: Callable[[], object],
    environment: Environment,
    on_device: Callable[[], float | None] = lambda: None,
) -> float:
    """Return the median time of a run.

    Args:
        work: the run.
        environment: contains the device.
        on_device: returns the time of the last run on the device; None: the time from the start of
            the run on the host to its end on the device is used.
    """
    for _ in range(WARM_UP_RUNS):
        work()
    times = []
    for _ in range(RUNS[environment.device]):
        _synchronize(environment)
        started = perf_counter()
        work()
        _synchronize(environment)
        elapsed, seconds = perf_counter() - started, on_device()
        times.append(elapsed if seconds is None else seconds)
    return median(times)


def _synchronize(environment: Environment) -> None:
    if environment.is_cuda:
        torch.cuda.synchronize()
