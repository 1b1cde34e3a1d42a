"""The package nccl4py and CUDA's streams, replaced by messages between threads of one process."""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from ssd.transport import nccl
from ssd.transport.communicator import DRAFT_RANK, TARGET_RANK, Place
from ssd.transport.nccl import NcclCommunicator
from ssd.transport.rendezvous import LinkStore

MAX_SECONDS = 5.0
SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7


class NcclError(Exception):
    """What calls of the package raise."""


class Stream:
    """A stream whose operations end in order, when something waits for them."""

    by_pointer: ClassVar[dict[int, "Stream"]] = {}
    current: ClassVar[list["Stream"]] = []
    """Of the newest ``with``; the tests of two ends run one after the other."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        self.cuda_stream = len(self.by_pointer) + 1
        self.by_pointer[self.cuda_stream] = self
        self.operations: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def wait_stream(self, other: "Stream") -> None:
        self.operations.put(other.synchronize)

    def synchronize(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.operations.get_nowait()()


class Event:
    """An event that happens when all operations before it have ended."""

    def __init__(self, **_settings: object) -> None: ...

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.synchronize()


class Memory:
    """Memory of the host or of the device, which is copied in the order of the stream."""

    def __init__(self, num_words: int) -> None:
        self.tensor = torch.zeros(num_words, dtype=torch.int32)

    def copy_(self, other: "Memory", *, non_blocking: bool) -> None:
        assert non_blocking
        Stream.current[-1].operations.put(lambda: self.tensor.copy_(other.tensor))


class FakeBuffer:
    """A buffer on the host and on a device that is not there."""

    def __init__(self, num_words: int, _device: torch.device) -> None:
        self.host, self.device = Memory(num_words), Memory(num_words)
        self.words = self.host.tensor.numpy()


class FakeNccl:
    """All communicators of a test. An abort frees memory, which waits until all are aborted."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.version: str | None = "2.32"
        self.problem = ""
        """The next error of the network."""
        self.has_peer = True
        """Whether a communicator whose peer is not in this process counts as connected."""
        self.checks_until_started = 0
        """How often a message is in progress when that is checked."""
        self.blocked_call = threading.Event()
        """Set by a call that returns only when another communicator than its own is aborted."""
        self.blocks = ""
        """Name of the call that does so."""
        self.asked = threading.Event()
        """Whether the state of a communicator without a peer was asked for."""
        self.changed = threading.Condition()
        self.num_ids = 0

    def unique_id(self) -> bytes:
        self.num_ids += 1
        return bytes([self.num_ids]) * 128

    def init(self, num_ranks: int, rank: int, unique_id: bytes, config: Any) -> "Handle":
        assert (num_ranks, config.blocking, config.max_ctas) == (2, False, 1)
        self.handles.append(Handle(self, rank, unique_id))
        return self.handles[-1]

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, MAX_SECONDS), "deadlock"


class Handle:
    """One communicator of NCCL."""

    def __init__(self, owner: FakeNccl, rank: int, unique_id: bytes) -> None:
        self.owner, self.rank, self.unique_id = owner, rank, unique_id
        self.is_aborted = False
        self.aborted_on: threading.Thread | None = None
        self.messages: list[torch.Tensor] = []
        """Those that this rank receives."""
        self.calls: list[tuple[str, int, int]] = []
        """Name, peer and stream."""

    @property
    def peer(self) -> "Handle | None":
        same = [each for each in self.owner.handles if each.unique_id == self.unique_id]
        return next((each for each in same if each.rank != self.rank), None)

    def get_async_error(self) -> int:
        assert not self.is_aborted, "it is freed"
        if self.owner.problem:
            return REMOTE_ERROR
        if self.peer is None and not self.owner.has_peer:
            self.owner.asked.set()
            return IN_PROGRESS
        self.owner.checks_until_started = max(0, self.owner.checks_until_started - 1)
        return IN_PROGRESS if self.owner.checks_until_started else SUCCESS

    def send(self, memory: Memory, peer: int, *, stream: int) -> None:
        self._called("send", peer, stream)

        def arrive() -> None:
            if self.peer is not None:
                with self.owner.changed:
                    self.peer.messages.append(memory.tensor.clone())
                    self.owner.changed.notify_all()

        Stream.by_pointer[stream].operations.put(arrive)

    def recv(self, memory: Memory, peer: int, *, stream: int) -> None:
        self._called("recv", peer, stream)

        def arrive() -> None:
            with self.owner.changed:
                self.owner.changed.wait_for(lambda: bool(self.messages) or self.is_aborted)
                if self.messages:
                    memory.tensor.copy_(self.messages.pop(0))

        Stream.by_pointer[stream].operations.put(arrive)

    def abort(self) -> None:
        with self.owner.changed:
            assert not self.is_aborted, "it is freed"
            self.is_aborted, self.aborted_on = True, threading.current_thread()
            self.owner.changed.notify_all()
        mine = [each for each in self.owner.handles if each.rank == self.rank]
        self.owner.wait(lambda: all(each.is_aborted for each in mine))

    def _called(self, name: str, peer: int, stream: int) -> None:
        self.calls.append((name, peer, stream))
        if name == self.owner.blocks:
            self.owner.blocked_call.set()
            others = [each for each in self.owner.handles if each is not self]
            self.owner.wait(lambda: any(each.is_aborted for each in others))


@contextlib.contextmanager
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """Replace the package, CUDA and the memory of the device."""
    made = FakeNccl()

    def unique_id(content: bytes) -> bytes:
        if len(content) != 128:
            raise ValueError("buffer length must be 128 bytes")
        return content

    core: Any = ModuleType("nccl.core")
    core.NCCLConfig = SimpleNamespace
    core.NcclInvalid = NcclError
    core.get_error_string = lambda result: made.problem if result == REMOTE_ERROR else "?"
    core.get_unique_id = made.unique_id
    core.get_version = lambda: SimpleNamespace(libnccl=made.version)
    core.UniqueId = SimpleNamespace(from_bytes=unique_id)
    core.Communicator = SimpleNamespace(init=made.init)
    package: Any = ModuleType("nccl")
    package.core = core
    bindings: Any = ModuleType("nccl.bindings.nccl")
    bindings.NCCLError = NcclError
    for name, module in {
        "nccl": package,
        "nccl.core": core,
        "nccl.bindings": ModuleType("nccl.bindings"),
        "nccl.bindings.nccl": bindings,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nccl, "NcclBuffer", FakeBuffer)
    monkeypatch.setattr(nccl, "_one_link", threading.Lock())
    monkeypatch.setattr(nccl, "END_SECONDS", 0.01)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    default = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: default)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    yield made


@contextlib.contextmanager
def entered(stream: Stream) -> Iterator[None]:
    """Run copies on a stream inside the context."""
    Stream.current.append(stream)
    try:
        yield
    finally:
        Stream.current.remove(stream)


def open_store(rank: int = TARGET_RANK) -> LinkStore:
    """Return a store without a peer; the store of a draft has the ids of a target."""
    store = LinkStore(lambda _key, _value: None, 1.0)
    if rank == DRAFT_RANK:
        for sender in (TARGET_RANK, DRAFT_RANK):
            store.put(f"nccl/{sender}", bytes([sender]) * 128)
    return store


def connected(rank: int = TARGET_RANK, store: LinkStore | None = None) -> NcclCommunicator:
    """Return one end, whose peer need not be there."""
    return nccl.connect(store or open_store(rank), Place(rank, "cuda:0", "peer", 1.0))
