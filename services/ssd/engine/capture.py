"""Functions over static tensors, captured once and replayed.

A *replay* runs the operations of a function again, on the same tensors. Everything that Python
computed is fixed at the capture; only the contents of the tensors change.

A function is captured as one graph. If that fails, it is captured in *pieces*: its parts that are
named by ``Capture.outside`` stay outside of graphs, and run eagerly between the replays of the
others. If that fails too, it runs eagerly. No attempt executes anything, so ranks whose attempts
differ still run the same collectives.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from ssd.observability.log import get_logger

_log = get_logger("ssd.engine")
Pass = Callable[[], Tensor]
"""Reads and writes tensors that stay in place, and returns one of its own."""
Part = Callable[[], tuple[Tensor, Tensor]]
"""A part of a pass: reads tensors that stay in place, and returns two of its own."""
Key = tuple[Any, ...]
"""Name of a shape: the kind of a pass, and its sizes."""


class CaptureError(RuntimeError):
    """An operation runs, but cannot be captured."""


class Kind(StrEnum):
    """How a shape runs."""

    WHOLE = "one graph"
    PIECES = "graphs between attentions"
    EAGER = "no graph"


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

    device: str
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
        self.kinds: dict[Key, Kind] = {}
        """How each shape runs."""
        self.num_bytes = 0
        """Device memory that all captures took."""
        self._graphs = graphs
        self._results: list[tuple[Tensor, Tensor]] | None = None
        """In a warm-up, the results of parts in order, without contents."""
        self._recording: _Recording | None = None

    def __call__(self, key: Key, function: Pass) -> Pass:
        """Return a function whose calls have the effect and the result of ``function``.

        The result stays in one place: the next call overwrites it.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
        """
        if self._graphs is None:
            self.kinds[key] = Kind.EAGER
            return function
        free_before = self._graphs.free_bytes()
        with self._graphs.on_stream():
            for _ in range(self._graphs.warm_up_runs):
                self._results = []
                function()
        results, self._results = self._results or [], None
        run, kind, num_graphs, reasons = self._attempt(self._graphs, function, results)
        self.kinds[key] = kind
        num_bytes = free_before - self._graphs.free_bytes()
        self.num_bytes += num_bytes
        if reasons:
            _log.warning(
                "shape_not_captured",
                shape=list(key),
                reason="; ".join(dict.fromkeys(reasons)),
                instead=kind.value,
                consequence="slower passes",
            )
        if num_graphs:
            _log.info("graph_captured", shape=list(key), graphs=num_graphs, bytes=num_bytes)
        return run

    def _attempt(
        self, graphs: Graphs, function: Pass, results: list[tuple[Tensor, Tensor]]
    ) -> tuple[Pass, Kind, int, list[str]]:
        """Return what runs, its kind and number of graphs, and why earlier attempts failed."""
        reasons: list[str] = []
        for kind in (Kind.WHOLE, Kind.PIECES):
            recording = _Recording(graphs, results if kind is Kind.PIECES else None)
            self._recording = recording
            try:
                return recording.record(function), kind, recording.num_graphs, reasons
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reasons.append(str(error).partition("\n")[0])
            finally:
                self._recording = None
        return function, Kind.EAGER, 0, reasons

    def outside(self, part: Part) -> tuple[Tensor, Tensor]:
        """Run a part of a pass. In a capture in pieces, the part stays outside of graphs."""
        if self._recording is not None and self._recording.is_in_pieces:
            return self._recording.outside(part)
        result = part()
        if self._results is not None:
            first, second = (torch.empty_like(tensor, device="meta") for tensor in result)
            self._results.append((first, second))
        return result


class _Recording:
    """One attempt to capture a function."""

    def __init__(self, graphs: Graphs, results: list[tuple[Tensor, Tensor]] | None) -> None:
        """Construct; in pieces, with the shapes of the results of all parts, in order."""
        self.is_in_pieces = results is not None
        self.num_graphs = 0
        self._graphs = graphs
        self._results = iter(results or [])
        self._steps: list[Callable[[], object]] = []
        self._graph: Graph | None = None

    def record(self, function: Pass) -> Pass:
        """Return the replay.

        Raises:
            RuntimeError: it cannot be captured.
        """
        with self._graphs.on_stream():
            try:
                self._begin()
                result = function()
                self._end()
            finally:
                if self._graph is not None:
                    self._abandon(self._graph)
        steps = tuple(self._steps)

        def replay() -> Tensor:
            for step in steps:
                step()
            return result

        return replay

    def outside(self, part: Part) -> tuple[Tensor, Tensor]:
        """End a graph, keep a place for the result of the part, and begin the next graph."""
        self._end()
        # Nothing has been computed yet, so the part cannot run: it would read any numbers.
        first, second = (
            torch.zeros_like(meta, device=self._graphs.device) for meta in next(self._results)
        )

        def run() -> None:
            # Later graphs read these places.
            for place, result in zip((first, second), part(), strict=True):
                place.copy_(result)

        self._steps.append(run)
        self._begin()
        return first, second

    def _begin(self) -> None:
        graph = self._graphs.make()
        self._graph = graph
        _thread.is_capturing = True
        graph.begin()

    def _end(self) -> None:
        graph = self._graph
        assert graph is not None
        graph.end()
        _thread.is_capturing = False
        self._graph = None
        self._steps.append(graph.replay)
        self.num_graphs += 1

    def _abandon(self, graph: Graph) -> None:
        _thread.is_capturing = False
        # A graph with an operation that cannot be recorded raises once more.
        with contextlib.suppress(RuntimeError):
            graph.end()
        self._graphs.give_up(graph)


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
        self.device = "cuda"
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
