"""Communicators between GPUs: NCCL, called directly.

Each direction has a communicator and a stream of its own. Messages are copied from pinned memory to
the device, sent, received and copied back. A posted receive is a kernel that waits on one of the
device's multiprocessors: ``torch.cuda.synchronize``, ``cudaFree`` and ``empty_cache`` would wait
for the peer. Synchronise streams and events instead. If the peer dies, the link's gRPC stream ends,
and ``abort`` ends the kernels; errors of the network are polled. No call of NCCL waits for the
peer, except ``ncclCommAbort``, which can wait for all kernels of the device.

A process has at most one such link; others use the next backend. With several links on one GPU,
NCCL would allocate and free memory for one of them, and this waits for the posted receives of the
others. Known limit: the first launch of a kernel that CUDA loads lazily, and the capture of a CUDA
graph, also wait for posted receives.

*Decision*: NCCL's own functions, from the library that torch loads. *Because*: the watchdog of
c10d's ``ProcessGroupNCCL`` ends the process when a peer dies, and the variable that prevents it is
that of the whole process, tensor-parallel group included. Its messages of both directions share one
stream, where a posted receive delays every send. *Not chosen*: one communicator for both
directions; NCCL runs its operations in order. *Revisit when* torch offers both.
"""

import contextlib
import ctypes
import functools
import re
import threading
import time
from dataclasses import dataclass, field

import torch

from ssd.errors import LinkError
from ssd.settings import nccl_log
from ssd.transport.communicator import DRAFT_RANK, TARGET_RANK, Place, Slot, Transfer
from ssd.transport.rendezvous import LinkStore

_LIBRARY = "libnccl.so.2"
_INT32 = 2
"""``ncclInt32``."""
_UNSET = -(2**31)
"""``NCCL_CONFIG_UNDEF_INT``."""
WATCH_SECONDS = 0.25
"""Pause between two checks for errors of the network."""
_IN_PROGRESS = 7
"""``ncclInProgress``."""
POLL_SECONDS = 0.001
"""Pause between two checks whether the two ranks are connected."""
SPIN_SECONDS = 0.0005
"""Time in which a message of connected ranks is checked without pauses: NCCL starts it within
microseconds, on a thread of its own. A pause would be longer than the message."""
END_SECONDS = 2.0
"""Maximum time that a new link waits for the end of the previous one, whose draft has ended."""
_one_link = threading.Lock()
"""Held by the communicator of this process, from its set-up until its memory is free."""
_PATH = re.compile(r" -> .* via (\S+)")
"""How a channel of NCCL sends, in its log: ``Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM``."""


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.17. Later versions have defaults for the fields after it."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    ]


def one_block_config() -> Config:
    """Return a configuration whose kernels take one multiprocessor and whose calls do not block."""
    return Config(
        size=ctypes.sizeof(Config),
        magic=0xCAFEBEEF,
        version=21700,
        blocking=0,
        cga_cluster_size=_UNSET,
        min_ctas=1,
        max_ctas=1,
        net_name=None,
    )


class Nccl:
    """NCCL's functions; each raises a ``LinkError`` with NCCL's message."""

    def __init__(self) -> None:
        """Load the library.

        Raises:
            OSError: there is none.
        """
        self._library = ctypes.CDLL(_LIBRARY)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        message = [pointer, size, number, number, pointer, pointer]
        for name, types in {
            "ncclGetUniqueId": [pointer],
            "ncclCommInitRankConfig": [pointer, number, UniqueId, number, pointer],
            "ncclCommGetAsyncError": [pointer, pointer],
            "ncclCommAbort": [pointer],
            "ncclSend": message,
            "ncclRecv": message,
        }.items():
            getattr(self._library, name).argtypes = types

    def call(self, name: str, *args: object) -> bool:
        """Call a function; return whether it has ended, False if ``is_ready`` states its end.

        Raises:
            LinkError: it failed.
        """
        return self._has_ended(getattr(self._library, name)(*args))

    def _has_ended(self, result: int) -> bool:
        """Return whether an operation has succeeded, False if it has not ended.

        Raises:
            LinkError: it failed, with NCCL's message.
        """
        if result not in {0, _IN_PROGRESS}:
            raise LinkError(f"NCCL: {self._library.ncclGetErrorString(result).decode()}")
        return result == 0

    def unique_id(self) -> UniqueId:
        """Return a new id of a communicator."""
        found = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(found))
        return found

    def communicator(self, unique_id: UniqueId, rank: int) -> ctypes.c_void_p:
        """Return a communicator of two ranks, which is connecting; see ``is_ready``."""
        found, config = ctypes.c_void_p(), one_block_config()
        self.call(
            "ncclCommInitRankConfig", ctypes.byref(found), 2, unique_id, rank, ctypes.byref(config)
        )
        return found

    def is_ready(self, communicator: ctypes.c_void_p) -> bool:
        """Return whether the last operation has ended.

        Raises:
            LinkError: it failed, or the network has failed since.
        """
        result = ctypes.c_int()
        self.call("ncclCommGetAsyncError", communicator, ctypes.byref(result))
        return self._has_ended(result.value)


class NcclSlot:
    """Memory of one message on the host, pinned, and on the device."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.host = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
        self.device = torch.empty(num_words, dtype=torch.int32, device=device)
        self.words = self.host.numpy()


class NcclTransfer:
    """A message whose last operation is recorded as an event."""

    def __init__(
        self, communicator: "NcclCommunicator", slot: NcclSlot, stream: torch.cuda.Stream
    ) -> None:
        self._communicator = communicator
        self._slot = slot
        # Blocking: a thread that waits for an idle peer must not use a CPU.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        """See ``Transfer``."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise LinkError(f"CUDA: {error}") from error
        self._communicator.check_end(self._slot)


@dataclass(frozen=True, slots=True)
class Direction:
    """What carries the messages from one rank to the other."""

    handle: ctypes.c_void_p
    stream: torch.cuda.Stream
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held in each call of NCCL with the handle, except ``ncclCommAbort``, which frees it."""


def abort_all(nccl: Nccl, directions: list[Direction]) -> list[threading.Thread]:
    """Abort communicators, each on a thread of its own; return the threads.

    ``ncclCommAbort`` ends its own kernels, then frees memory, which waits for all kernels of the
    device. So no abort may wait until another one has ended. The caller refuses further calls.
    """

    def abort(way: Direction) -> None:
        with way.lock:
            pass  # Wait for a call that has begun. Later calls are refused without the lock.
        with contextlib.suppress(LinkError):
            nccl.call("ncclCommAbort", way.handle)

    threads = [threading.Thread(target=abort, args=(each,), daemon=True) for each in directions]
    for thread in threads:
        thread.start()
    return threads


class NcclCommunicator:
    """A ``Communicator`` over NCCL. A thread watches for errors of the network."""

    num_probe_bytes = 64 << 20

    def __init__(
        self, nccl: Nccl, device: torch.device, rank: int, directions: list[Direction]
    ) -> None:
        """Take over communicators that are initialised.

        Args:
            nccl: the library.
            device: of the messages.
            rank: of this end.
            directions: by the rank that sends.
        """
        self._nccl = nccl
        self._device = device
        self._peer = 1 - rank
        self._out, self._in = directions[rank], directions[1 - rank]
        self._in_flight: set[NcclSlot] = set()
        """What the device may read or write. The memory must stay until it has ended."""
        self._lock = threading.Lock()
        """Guards ``_error`` and ``_aborts``. Not held in a call of NCCL, so ``abort`` returns at
        once on any thread."""
        self._error: LinkError | None = None
        self._aborts: list[threading.Thread] = []
        self._ended = threading.Event()

    def watch(self) -> None:
        """Start to watch for errors of the network. Called once."""
        threading.Thread(target=self._watch, name="nccl-watch", daemon=True).start()

    @functools.cached_property
    def transport(self) -> str:
        """The path in NCCL's log, if the environment asks for a log; else ``NCCL``."""
        log = nccl_log()
        return path_of(log.read_text(errors="replace")) if log and log.is_file() else "NCCL"

    def slot(self, num_words: int) -> NcclSlot:
        """See ``Communicator``.

        Raises:
            LinkError: the device has no memory for it.
        """
        try:
            return NcclSlot(num_words, self._device)
        except RuntimeError as error:
            raise LinkError(f"CUDA: {error}") from error

    def send(self, slot: Slot, num_words: int) -> Transfer:
        """See ``Communicator``. Sends the whole slot: both ends must give NCCL the same size."""
        del num_words
        assert isinstance(slot, NcclSlot)
        with torch.cuda.device(self._device), torch.cuda.stream(self._out.stream):
            self._in_flight.add(slot)
            slot.device.copy_(slot.host, non_blocking=True)
            self._transfer("ncclSend", slot, self._out)
            return NcclTransfer(self, slot, self._out.stream)

    def receive(self, slot: Slot) -> Transfer:
        """See ``Communicator``."""
        assert isinstance(slot, NcclSlot)
        with torch.cuda.device(self._device), torch.cuda.stream(self._in.stream):
            self._in_flight.add(slot)
            self._transfer("ncclRecv", slot, self._in)
            slot.host.copy_(slot.device, non_blocking=True)
            return NcclTransfer(self, slot, self._in.stream)

    def check_end(self, slot: NcclSlot) -> None:
        """Release a slot that the device no longer uses; raise if the communicator was aborted.

        Raises:
            LinkError: with the cause.
        """
        self._in_flight.discard(slot)
        self._raise_error()

    def abort(self) -> None:
        """See ``Communicator``. Ends the kernels that wait on the device."""
        self._abort(LinkError("the NCCL connection was aborted"))

    def close(self) -> None:
        """See ``Communicator``."""
        self.abort()
        for thread in self._aborts:
            thread.join()
        try:
            # Kernels and copies have ended or end now; then their buffers may be freed.
            self._out.stream.synchronize()
            self._in.stream.synchronize()
        finally:
            # Also after an error of the device, so that the next link reports that one.
            self._in_flight.clear()
            _one_link.release()

    def _transfer(self, function: str, slot: NcclSlot, way: Direction) -> None:
        """Start to send or receive. The first message of a direction waits for the peer.

        Raises:
            LinkError: the network has failed, or the communicator was aborted.
        """
        pointer, size = slot.device.data_ptr(), slot.device.numel()
        stream = way.stream.cuda_stream
        with way.lock:
            self._raise_error()
            is_started = self._nccl.call(
                function, pointer, size, _INT32, self._peer, way.handle, stream
            )
        spins_until = time.perf_counter() + SPIN_SECONDS
        while not is_started:
            if time.perf_counter() > spins_until:
                self._ended.wait(POLL_SECONDS)
            is_started = self._is_ready(way)

    def _is_ready(self, way: Direction) -> bool:
        with way.lock:
            self._raise_error()
            return self._nccl.is_ready(way.handle)

    def _abort(self, error: LinkError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
                self._ended.set()
                self._aborts = abort_all(self._nccl, [self._out, self._in])

    def _raise_error(self) -> None:
        if self._error is not None:
            raise LinkError(str(self._error))

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            try:
                self._is_ready(self._out)
                self._is_ready(self._in)
            except LinkError as error:
                self._abort(error)


@functools.cache
def library() -> Nccl | None:
    """Return NCCL, None if there is none."""
    try:
        return Nccl()
    except OSError:
        return None


def is_available(device: str) -> bool:
    """Whether the device is a GPU and NCCL is there."""
    return device.startswith("cuda") and torch.cuda.is_available() and library() is not None


def connect(store: LinkStore, place: Place) -> NcclCommunicator:
    """See ``Backend``. A process that has a communicator gets no other one."""
    nccl, device = library(), torch.device(place.device)
    assert nccl is not None
    if not _one_link.acquire(timeout=END_SECONDS):
        raise LinkError("NCCL: another link of this process uses it or has not ended")
    directions: list[Direction] = []
    with contextlib.ExitStack() as undo:
        undo.callback(_undo, nccl, directions)
        with torch.cuda.device(device):
            for sender in (TARGET_RANK, DRAFT_RANK):
                unique_id = _shared_id(nccl, store, place.rank, f"nccl/{sender}")
                stream = torch.cuda.Stream(device, priority=-1)
                handle = nccl.communicator(unique_id, place.rank)
                directions.append(Direction(handle, stream))
                _until_ready(nccl, handle, store, place.seconds)
        communicator = NcclCommunicator(nccl, device, place.rank, directions)
        communicator.watch()
        undo.pop_all()
    return communicator


def _until_ready(nccl: Nccl, handle: ctypes.c_void_p, store: LinkStore, seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    while not nccl.is_ready(handle):
        if time.perf_counter() > deadline:
            raise LinkError(f"NCCL: not connected within {seconds:g} s")
        store.pause(POLL_SECONDS)


def _undo(nccl: Nccl, directions: list[Direction]) -> None:
    """Abort a set-up; another one may begin once its memory is free. Does not wait for this."""
    aborts = abort_all(nccl, directions)

    def release() -> None:
        for thread in aborts:
            thread.join()
        _one_link.release()

    threading.Thread(target=release, name="nccl-undo", daemon=True).start()


def path_of(log: str) -> str:
    """Return the path of the newest channel in NCCL's log, for example ``P2P/CUMEM``."""
    found = _PATH.findall(log)
    return found[-1] if found else "NCCL"


def _shared_id(nccl: Nccl, store: LinkStore, rank: int, key: str) -> UniqueId:
    """Return the id that the target creates."""
    if rank == TARGET_RANK:
        unique_id = nccl.unique_id()
        store.set(key, bytes(unique_id))
        return unique_id
    received = store.get(key)
    if len(received) != ctypes.sizeof(UniqueId):
        raise LinkError(f"an id of NCCL has {len(received)} bytes, expected 128")
    return UniqueId.from_buffer_copy(received)
