"""Communicators between GPUs: NCCL, called through NVIDIA's package ``nccl4py``.

Each direction has a communicator and a stream of its own: NCCL runs the operations of one in order,
where a receive would delay every send. Messages are copied from pinned memory to the device, sent,
received and copied back. A receive is a kernel that waits on one of the device's multiprocessors:
``torch.cuda.synchronize``, ``cudaFree`` and ``empty_cache`` would wait for the peer. Synchronise
streams and events instead. If the peer dies, the link's gRPC stream ends, and ``abort`` ends the
kernels. No call of NCCL waits for the peer, except the one that aborts, which can wait for all
kernels of the device.

A process has at most one such link; others use gRPC. With several links on one GPU, NCCL would
allocate and free memory for one of them, and this waits for the receives of the others. Known
limit: the first launch of a kernel that CUDA loads lazily, and the capture of a CUDA graph, also
wait for receives.

*Decision*: ``nccl4py``, without blocking calls. *Because*: it is NVIDIA's own binding, and the
set-up of a communicator that blocks cannot be aborted if the peer never comes. *Not chosen*: c10d's
``ProcessGroupNCCL``. Its watchdog ends the process when a peer dies, and the variable that prevents
this end applies to every group of the process, the tensor-parallel one included. *Revisit when*
torch has a setting for one group.
"""

import contextlib
import functools
import importlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from ssd.errors import LinkError
from ssd.settings import nccl_log
from ssd.transport.communicator import DRAFT_RANK, TARGET_RANK, Buffer, Place
from ssd.transport.rendezvous import LinkStore

_SUCCESS, _IN_PROGRESS = 0, 7
"""``ncclSuccess``, and ``ncclInProgress``: a call has begun and not failed."""
POLL_SECONDS = 0.001
"""Pause between two checks whether the two ranks are connected."""
SPIN_SECONDS = 0.0005
"""Time in which a message of connected ranks is checked without pauses: NCCL starts it within
microseconds, on a thread of its own. A pause would be longer than the message."""
LATE_SECONDS = 0.5
"""Maximum time that a message waits for the start of the one before it; the caller's thread waits,
and a message takes microseconds."""
END_SECONDS = 2.0
"""Maximum time that a new link waits for the end of the previous one, whose draft has ended."""
_one_link = threading.Lock()
"""Held by the communicator of this process, from its set-up until its memory is free."""
_PATH = re.compile(r" -> .* via (\S+)")
"""How a channel of NCCL sends, in its log: ``Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM``."""


class NcclBuffer:
    """Memory of one message on the host, pinned, and on the device."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.host = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
        self.device = torch.empty(num_words, dtype=torch.int32, device=device)
        self.words = self.host.numpy()


@dataclass(frozen=True, slots=True)
class Started:
    """A message that has not ended: the memory must stay as long as the device may use it."""

    buffer: NcclBuffer
    event: torch.cuda.Event
    """Recorded after the last operation of the message."""


@dataclass(eq=False, slots=True)
class Direction:
    """What carries the messages from one rank to the other."""

    handle: Any
    """``nccl.core.Communicator``, whose calls return before they have ended."""
    stream: torch.cuda.Stream
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held in each call with the handle, except the one that aborts, which frees it."""
    is_aborted: bool = False
    started: deque[Started] = field(default_factory=deque)

    def call(self, function: Callable[[], object]) -> bool:
        """Start a call of NCCL; return whether it and the former ones have ended.

        Raises:
            LinkError: it failed, the network has failed since, or NCCL was aborted.
        """
        with self.lock:
            if self.is_aborted:
                raise LinkError("the NCCL connection was aborted")
            with nccl_errors():
                function()
                result = int(self.handle.get_async_error())
                if result not in {_SUCCESS, _IN_PROGRESS}:
                    raise LinkError(f"NCCL: {core().get_error_string(result)}")
        return result == _SUCCESS

    def has_ended(self) -> bool:
        """Return whether the calls have ended; see ``call``."""
        return self.call(lambda: None)

    def abort(self) -> None:
        """End kernels and calls, and free the handle. Blocks. Later calls are refused before."""
        with self.lock:
            pass  # Wait for a call that has begun.
        with contextlib.suppress(LinkError), nccl_errors():
            self.handle.abort()


class NcclCommunicator:
    """A ``Communicator`` over NCCL."""

    num_probe_bytes = 16 << 20

    def __init__(self, device: torch.device, rank: int, directions: list[Direction]) -> None:
        """Take over communicators that are connected.

        Args:
            device: of the messages.
            rank: of this end.
            directions: by the rank that sends.
        """
        self._device = device
        self._peer = 1 - rank
        self._directions = directions
        self._out, self._in = directions[rank], directions[1 - rank]
        self._lock = threading.Lock()
        """Guards ``_aborts``. Not held in a call of NCCL, so ``abort`` does not block."""
        self._aborts: list[threading.Thread] = []
        self._ended = threading.Event()

    @functools.cached_property
    def transport(self) -> str:
        """The path in NCCL's log, if the environment asks for a log; else ``NCCL``."""
        log = nccl_log()
        return path_of(log.read_text(errors="replace")) if log and log.is_file() else "NCCL"

    def buffer(self, num_words: int) -> NcclBuffer:
        """See ``Communicator``."""
        with cuda_errors():
            buffer = NcclBuffer(num_words, self._device)
            # A kernel in the queue of the present stream can still use the memory: the allocator
            # reuses the memory of a tensor before the kernels that read it have ended.
            for way in self._directions:
                way.stream.wait_stream(torch.cuda.current_stream(self._device))
        return buffer

    def start_send(self, buffer: Buffer, num_words: int) -> None:
        """See ``Communicator``. Sends the whole buffer: both ends must give NCCL the same size."""
        del num_words
        assert isinstance(buffer, NcclBuffer)
        way = self._out
        with self._messages(way):
            self._until_started(way, LATE_SECONDS)
            buffer.device.copy_(buffer.host, non_blocking=True)
            self._start(way, buffer, way.handle.send)

    def end_send(self) -> None:
        """See ``Communicator``."""
        with self._messages(self._out):
            self._until_started(self._out)
            self._out.started[0].event.record(self._out.stream)
        self._end(self._out)

    def start_receive(self, buffer: Buffer) -> None:
        """See ``Communicator``."""
        assert isinstance(buffer, NcclBuffer)
        way = self._in
        with self._messages(way):
            self._start(way, buffer, way.handle.recv)
            self._until_started(way)
            buffer.host.copy_(buffer.device, non_blocking=True)
            way.started[-1].event.record(way.stream)

    def end_receive(self) -> None:
        """See ``Communicator``."""
        self._end(self._in)

    def check(self) -> None:
        """See ``Communicator``."""
        for way in self._directions:
            way.has_ended()

    def abort(self) -> None:
        """See ``Communicator``. Ends the kernels that wait on the device."""
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self._aborts = abort_all(self._directions)

    def close(self) -> None:
        """See ``Communicator``."""
        self.abort()
        with self._lock:
            aborts = self._aborts
        for thread in aborts:
            thread.join()
        try:
            # Kernels and copies have ended or end now; then their buffers may be freed.
            for way in self._directions:
                way.stream.synchronize()
        finally:
            # Also after an error of the device, so that the next link reports that one.
            for way in self._directions:
                way.started.clear()
            _one_link.release()

    @contextlib.contextmanager
    def _messages(self, way: Direction) -> Iterator[None]:
        with cuda_errors(), torch.cuda.device(self._device), torch.cuda.stream(way.stream):
            yield

    def _start(self, way: Direction, buffer: NcclBuffer, function: Callable[..., object]) -> None:
        # Blocking: a thread that waits for an idle peer must not use a CPU.
        way.started.append(Started(buffer, torch.cuda.Event(blocking=True)))
        stream = way.stream.cuda_stream
        way.call(lambda: function(buffer.device, self._peer, stream=stream))

    def _until_started(self, way: Direction, seconds: float = inf) -> None:
        """Wait until NCCL has started all messages. The first of a direction waits for the peer."""
        begun_at = time.perf_counter()
        while not way.has_ended():
            waited = time.perf_counter() - begun_at
            if waited > seconds:
                raise LinkError(f"NCCL has not started a message within {seconds:g} s")
            if waited > SPIN_SECONDS:
                self._ended.wait(POLL_SECONDS)

    def _end(self, way: Direction) -> None:
        with cuda_errors():
            way.started[0].event.synchronize()
        if self._ended.is_set():
            raise LinkError("the NCCL connection was aborted")
        way.started.popleft()


def abort_all(directions: list[Direction]) -> list[threading.Thread]:
    """Abort communicators, each on a thread of its own; return the threads.

    An abort ends its own kernels, then frees memory, which waits for all kernels of the device. So
    no abort may wait until another one has ended.
    """
    for way in directions:
        way.is_aborted = True
    threads = [threading.Thread(target=way.abort, daemon=True) for way in directions]
    for thread in threads:
        thread.start()
    return threads


def core() -> Any:
    """Return the package, which loads NCCL."""
    return importlib.import_module("nccl.core")


@contextlib.contextmanager
def nccl_errors() -> Iterator[None]:
    """Turn the errors of the package into a ``LinkError``.

    cuda-core, which it calls, raises RuntimeErrors. Known limit: its ``CUDAError`` has no public
    name, so it stays.
    """
    own = importlib.import_module("nccl.bindings.nccl").NCCLError, core().NcclInvalid
    try:
        yield
    except (*own, ValueError, RuntimeError) as error:
        raise LinkError(f"NCCL: {error}") from error


@contextlib.contextmanager
def cuda_errors() -> Iterator[None]:
    """Turn the errors of torch into a ``LinkError``."""
    try:
        yield
    except RuntimeError as error:
        raise LinkError(f"CUDA: {error}") from error


@functools.cache
def has_nccl() -> bool:
    """Whether the package and NCCL are there."""
    try:
        return core().get_version().libnccl is not None
    except (ImportError, RuntimeError):
        return False


def is_available(device: str) -> bool:
    """Whether the device is a GPU, and NCCL and its package are there."""
    return device.startswith("cuda") and torch.cuda.is_available() and has_nccl()


def connect(store: LinkStore, place: Place) -> NcclCommunicator:
    """See ``Backend``. A process that has a communicator gets no other one."""
    device = torch.device(place.device)
    if not _one_link.acquire(timeout=END_SECONDS):
        raise LinkError("NCCL: another link of this process uses it or has not ended")
    directions: list[Direction] = []
    with contextlib.ExitStack() as undo:
        undo.callback(_undo, directions)
        with torch.cuda.device(device):
            for sender in (TARGET_RANK, DRAFT_RANK):
                way = _direction(store, place, f"nccl/{sender}", device)
                directions.append(way)
                _until_connected(way, store, place.seconds)
        undo.pop_all()
    return NcclCommunicator(device, place.rank, directions)


def _direction(store: LinkStore, place: Place, key: str, device: torch.device) -> Direction:
    """Return a communicator that is connecting, with the id that the target creates."""
    # One multiprocessor for each kernel.
    config = core().NCCLConfig(blocking=False, min_ctas=1, max_ctas=1)
    stream = torch.cuda.Stream(device, priority=-1)
    with nccl_errors():
        if place.rank == TARGET_RANK:
            store.set(key, bytes(core().get_unique_id()))
        unique_id = core().UniqueId.from_bytes(store.get(key))
        return Direction(core().Communicator.init(2, place.rank, unique_id, config), stream)


def _until_connected(way: Direction, store: LinkStore, seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    while not way.has_ended():
        if time.perf_counter() > deadline:
            raise LinkError(f"NCCL: not connected within {seconds:g} s")
        store.pause(POLL_SECONDS)


def _undo(directions: list[Direction]) -> None:
    """Abort a set-up; another one may begin once its memory is free. Does not wait for this."""
    aborts = abort_all(directions)

    def release() -> None:
        for thread in aborts:
            thread.join()
        _one_link.release()

    threading.Thread(target=release, name="nccl-undo", daemon=True).start()


def path_of(log: str) -> str:
    """Return the path of the newest channel in NCCL's log, for example ``P2P/CUMEM``."""
    paths = _PATH.findall(log)
    return paths[-1] if paths else "NCCL"
