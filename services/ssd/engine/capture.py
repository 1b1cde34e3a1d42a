"""Functions over static tensors, captured once and replayed.

A *replay* runs the operations of a function again, on the same tensors. Everything that Python
computed is fixed at the capture; only the contents of the tensors change.

A function is captured as one graph. If that fails, it runs eagerly. A capture executes nothing, so
a rank whose capture fails still runs the same collectives as the others.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ssd.observability.log import get_logger

_log = get_logger("ssd.engine")
Pass = Callable[[], Tensor]
"""Reads and writes tensors that stay in place, and returns one of its own."""
Key = tuple[Any, ...]
"""Name of a shape: the kind of a pass, and its sizes."""


class CaptureError(RuntimeError):
    """An operation runs, but cannot be captured."""


class Graph(Protocol):
    """The operations of one thread on a device between ``begin`` and ``end``."""

    def begin(self) -> None:
        """Begin to record operations instead of running them."""

    def end(self) -> None:
        """End the recording; also after an operation that cannot be recorded."""

    def replay(self) -> None:
        """Start the operations."""


class Graphs(Protocol):
    """The graphs of a device. Step thread only."""

    warm_up_runs: int
    """Runs of a function before its capture, so that kernels are compiled."""

    def on_stream(self) -> AbstractContextManager[None]:
        """Inside, operations are in the queue that can be captured, after all earlier ones."""

    def free_bytes(self) -> int:
        """Return the free memory of the device."""

    def make(self) -> Graph:
        """Return a graph. Its memory is shared with those of other shapes."""

    def give_up(self, graph: Graph) -> None:
        """Keep a graph whose capture has failed out of the way of later ones."""


_thread = threading.local()


def is_capturing() -> bool:
    """Return whether operations of this thread are recorded now."""
    return getattr(_thread, "is_capturing", False)


class Capture:
    """Makes replayable functions. Step thread only."""

    def __init__(self, graphs: Graphs | None = None) -> None:
        """Construct; without graphs, each call runs the function: for devices that have none."""
        self.is_captured: dict[Key, bool] = {}
        """Whether each shape is a graph; the others run eagerly."""
        self.num_bytes = 0
        """Device memory that all captures took."""
        self._graphs = graphs

    def __call__(self, key: Key, function: Pass) -> Pass:
        """Return a function whose calls have the effect and the result of ``function``.

        The result stays in one place: the next call overwrites it.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
        """
        self.is_captured[key] = False
        if self._graphs is None:
            return function
        free_before = self._graphs.free_bytes()
        with self._graphs.on_stream():
            for _ in range(self._graphs.warm_up_runs):
                function()
        run = function
        try:
            run = _captured(self._graphs, function)
            self.is_captured[key] = True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _log.warning(
                "shape_not_captured",
                shape=list(key),
                reason=str(error).partition("\n")[0],
                instead="no graph",
                consequence="slower passes",
            )
        num_bytes = free_before - self._graphs.free_bytes()
        self.num_bytes += num_bytes
        if self.is_captured[key]:
            _log.info("graph_captured", shape=list(key), bytes=num_bytes)
        return run


def _captured(graphs: Graphs, function: Pass) -> Pass:
    """Return the replay of a function.

    Raises:
        RuntimeError: it cannot be captured.
    """
    with graphs.on_stream():
        graph = graphs.make()
        _thread.is_capturing = True
        try:
            graph.begin()
            result = function()
            graph.end()
        except BaseException:
            _thread.is_capturing = False
            # A graph with an operation that cannot be recorded raises once more.
            with contextlib.suppress(RuntimeError):
                graph.end()
            graphs.give_up(graph)
            raise
        _thread.is_capturing = False

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class CudaGraph:
    """One CUDA graph."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()
        self.replay = self._graph.replay

    def begin(self) -> None:
        """See ``Graph``."""
        # Calls of other threads, for example of a channel, must not end the capture.
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """See ``Graph``."""
        self._graph.capture_end()


class CudaGraphs:
    """CUDA graphs with one memory pool. Passes of different shapes do not run at the same time."""

    warm_up_runs = 2

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._failed: list[Graph] = []

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """See ``Graphs``."""
        # Memory that is cached for eager passes may be needed by a graph.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def free_bytes(self) -> int:
        """See ``Graphs``."""
        return torch.cuda.mem_get_info()[0]

    def make(self) -> Graph:
        """See ``Graphs``."""
        return CudaGraph(self._pool)

    def give_up(self, graph: Graph) -> None:
        """See ``Graphs``."""
        # The allocator may still refer to the graph, and to the pool as in use.
        self._failed.append(graph)
        # A ``capture_end`` that fails leaves this out: for the allocator, the capture goes on.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001
        self._pool = torch.cuda.graph_pool_handle()


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
    return Capture(CudaGraphs() if device.startswith("cuda") else None)
