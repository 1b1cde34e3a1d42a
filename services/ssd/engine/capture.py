"""Functions over static tensors, captured once and replayed.

A *replay* runs the operations of a function again, on the same tensors. Everything that Python
computed is fixed at the capture; only the contents of the tensors change.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")
Pass = Callable[[], Tensor]
"""Reads and writes tensors that stay in place, and returns one of its own."""
_WARM_UP_RUNS = 2


class CaptureError(Exception):
    """A function runs, but its operations cannot be captured."""


class Capture(Protocol):
    """Makes replayable functions. Step thread only."""

    def __call__(self, function: Pass) -> Pass:
        """Return a function whose calls have the effect and the result of ``function``.

        The result stays in one place: the next call overwrites it.

        Raises:
            CaptureError: the function can still be called itself.
        """
        ...


def run_eagerly(function: Pass) -> Pass:
    """Capture nothing: each call runs the function. For devices without graphs."""
    return function


class CudaGraphs:
    """CUDA graphs with one memory pool. Passes of different shapes do not run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, function: Pass) -> Pass:
        """See ``Capture``."""
        free_before, _ = torch.cuda.mem_get_info()
        # Kernels are compiled and libraries allocate their workspaces before the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context restores the stream, which a failed capture does not.
            # Calls of other threads, for example of a channel, must not end the capture.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The allocator may still refer to the graph, and to the pool as in use.
            self._failed.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            raise CaptureError(str(error).partition("\n")[0]) from error
        used = free_before - torch.cuda.mem_get_info()[0]
        _log.info("graph_captured", shape=list(result.shape), bytes=used)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class CudaTimer:
    """The time that a device takes for some work, measured by the device."""

    def __init__(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """Mark the begin in the queue of the device."""
        self._begun.record()

    def end(self) -> None:
        """Mark the end."""
        self._ended.record()

    def seconds(self) -> float:
        """Return the time between both; waits for the end."""
        self._ended.synchronize()
        milliseconds: float = self._begun.elapsed_time(self._ended)
        return milliseconds / 1000


def capture_of(device: str) -> Capture:
    """Return how passes on a device are captured."""
    return CudaGraphs() if device.startswith("cuda") else run_eagerly
