"""What NCCL is called with, and what ends a communicator. The library and the GPU are replaced."""

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssd.errors import LinkError
from ssd.transport import nccl
from ssd.transport.communicator import DRAFT_RANK, TARGET_RANK, Place
from ssd.transport.nccl import NcclCommunicator, path_of
from ssd.transport.rendezvous import LinkStore

MAX_SECONDS = 5.0
LOG = """\
host:7:91 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[0] via SHM/direct/direct
host:7:91 [0] NCCL INFO Connected all rings
host:7:98 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
host:7:98 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""


class RecordedNccl:
    """Records calls. An abort frees memory, which waits until all communicators are aborted."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ids: list[bytes] = []
        self.problem = ""
        """The next error of the network."""
        self.is_connected = True
        """Whether the peer is there."""
        self.checks_until_started = 0
        """How often a message is in progress when that is checked."""
        self.has_polled = threading.Event()
        """Whether a call asked for a peer that is not there."""
        self.blocked_call = ""
        """Function that returns only when another communicator than its own is aborted."""
        self.open: set[str] = set()
        self.threads: list[threading.Thread] = []
        """Those that aborted."""
        self._aborted: set[str] = set()
        self._changed = threading.Condition()

    def call(self, name: str, *args: Any) -> bool:
        self.calls.append((name, *args))
        if name == "ncclCommAbort":
            self.threads.append(threading.current_thread())
            with self._changed:
                self._aborted.add(args[0])
                self._changed.notify_all()
            self._wait(lambda: self._aborted >= self.open)
        elif name == self.blocked_call:
            self.has_polled.set()
            self._wait(lambda: bool(self._aborted - {args[4]}))
        return self.is_connected and not self.checks_until_started

    def unique_id(self) -> nccl.UniqueId:
        number = len(self.calls) + len(self.ids)
        return nccl.UniqueId((ctypes.c_ubyte * 128)(number, 0, 7))

    def communicator(self, unique_id: nccl.UniqueId, rank: int) -> str:
        self.ids.append(bytes(unique_id))
        handle = f"communicator {len(self.ids) - 1} of rank {rank}"
        self.open.add(handle)
        return handle

    def is_ready(self, communicator: str) -> bool:
        assert communicator not in self._aborted, "it is freed"
        if self.problem:
            raise LinkError(self.problem)
        if not self.is_connected:
            self.has_polled.set()
        self.checks_until_started = max(0, self.checks_until_started - 1)
        return self.is_connected and not self.checks_until_started

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, MAX_SECONDS), "deadlock"


class Stream:
    """A stream whose operations have ended."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        self.cuda_stream = 5

    def synchronize(self) -> None: ...


class Event:
    """An event that has happened."""

    def __init__(self, **_settings: object) -> None: ...

    def record(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...


class HostSlot:
    """A slot without a device."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.host = torch.zeros(num_words, dtype=torch.int32)
        self.device = torch.zeros(num_words, dtype=torch.int32)
        self.words = self.host.numpy()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> RecordedNccl:
    made = RecordedNccl()
    monkeypatch.setattr(nccl, "library", lambda: made)
    monkeypatch.setattr(nccl, "NcclSlot", HostSlot)
    monkeypatch.setattr(nccl, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(nccl, "_one_link", threading.Lock())
    monkeypatch.setattr(nccl, "END_SECONDS", 0.01)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def open_store(rank: int = TARGET_RANK) -> LinkStore:
    store = LinkStore(lambda _key, _value: None, 1.0)
    if rank == DRAFT_RANK:
        for sender in (TARGET_RANK, DRAFT_RANK):
            store.put(f"nccl/{sender}", bytes([sender]) * 128)
    return store


def connected(rank: int = TARGET_RANK) -> NcclCommunicator:
    return nccl.connect(open_store(rank), Place(rank, "cuda:0", "peer", 1.0))


def started(call: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    """Run a call on a thread; return the thread and its list of the link's errors."""
    errors: list[str] = []

    def run() -> None:
        try:
            call()
        except LinkError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def check_ended(thread: threading.Thread) -> None:
    thread.join(MAX_SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("rank", [TARGET_RANK, DRAFT_RANK])
def test_each_direction_has_its_own_communicator(library: RecordedNccl, rank: int) -> None:
    ends = connected(rank)
    slot = ends.slot(10)
    ends.send(slot, 3).wait()
    ends.receive(slot).wait()
    sent, received = (each for each in library.calls if each[0] in {"ncclSend", "ncclRecv"})
    assert sent[0] == "ncclSend"
    assert sent[2:] == (10, 2, 1 - rank, f"communicator {rank} of rank {rank}", 5)
    assert received[2:] == (10, 2, 1 - rank, f"communicator {1 - rank} of rank {rank}", 5)
    ends.close()


def test_both_ends_use_the_ids_of_the_target(library: RecordedNccl) -> None:
    connected(DRAFT_RANK).close()
    assert library.ids == [bytes([0]) * 128, bytes([1]) * 128]


def test_an_id_of_another_size_is_refused(library: RecordedNccl) -> None:
    store = LinkStore(lambda _key, _value: None, 1.0)
    store.put("nccl/0", b"short")
    with pytest.raises(LinkError, match="has 5 bytes, expected 128"):
        nccl.connect(store, Place(DRAFT_RANK, "cuda:0", "peer", 1.0))


def test_an_abort_happens_once_and_refuses_what_follows(library: RecordedNccl) -> None:
    ends = connected()
    slot = ends.slot(4)
    waiting = ends.receive(slot)
    ends.abort()
    ends.close()
    assert [each[0] for each in library.calls].count("ncclCommAbort") == 2
    with pytest.raises(LinkError, match="aborted"):
        waiting.wait()
    with pytest.raises(LinkError, match="aborted"):
        ends.send(slot, 4)


def test_an_error_of_the_network_aborts_both_directions(library: RecordedNccl) -> None:
    ends = connected()
    library.problem = "a remote process has ended"
    assert ends._ended.wait(MAX_SECONDS)
    ends.close()
    assert [each[0] for each in library.calls].count("ncclCommAbort") == 2
    with pytest.raises(LinkError, match="a remote process has ended"):
        ends.send(ends.slot(4), 4)


def test_both_communicators_are_aborted_although_one_waits_for_the_other(
    library: RecordedNccl,
) -> None:
    ends = connected()
    ends.receive(ends.slot(4))
    closing, _ = started(ends.close)
    check_ended(closing)
    assert {each[1] for each in library.calls if each[0] == "ncclCommAbort"} == library.open


def test_an_abort_does_not_wait_for_nccl(library: RecordedNccl) -> None:
    ends = connected()
    library.open.add("communicator of another link")
    ends.abort()
    assert threading.current_thread() not in library.threads
    with pytest.raises(LinkError, match="aborted"):
        ends.receive(ends.slot(4))
    library.call("ncclCommAbort", "communicator of another link")
    ends.close()


def test_a_message_that_nccl_starts_on_its_thread_is_sent_without_a_pause(
    library: RecordedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = connected()
    library.checks_until_started = 3
    monkeypatch.setattr(nccl, "POLL_SECONDS", 10 * MAX_SECONDS)
    monkeypatch.setattr(nccl, "SPIN_SECONDS", MAX_SECONDS)
    sending, errors = started(lambda: ends.send(ends.slot(4), 4))
    check_ended(sending)
    assert errors == []
    ends.close()


def test_an_abort_ends_a_first_message_whose_peer_does_not_answer(library: RecordedNccl) -> None:
    ends = connected()
    library.is_connected = False
    sending, errors = started(lambda: ends.send(ends.slot(4), 4))
    assert library.has_polled.wait(MAX_SECONDS)
    ends.abort()
    check_ended(sending)
    assert errors == ["the NCCL connection was aborted"]
    ends.close()


def test_an_abort_returns_while_a_call_of_nccl_blocks(library: RecordedNccl) -> None:
    ends = connected()
    library.blocked_call = "ncclSend"
    sending, _ = started(lambda: ends.send(ends.slot(4), 4))
    assert library.has_polled.wait(MAX_SECONDS)
    aborting, _ = started(ends.abort)
    check_ended(aborting)
    check_ended(sending)
    ends.close()


def test_a_closed_store_ends_a_set_up_whose_peer_does_not_answer(library: RecordedNccl) -> None:
    library.is_connected = False
    store = open_store()
    connecting, errors = started(
        lambda: nccl.connect(store, Place(TARGET_RANK, "cuda:0", "peer", 1.0))
    )
    assert library.has_polled.wait(MAX_SECONDS)
    store.close("the link is lost")
    check_ended(connecting)
    assert errors == ["the link is lost"]
    for thread in library.threads:
        check_ended(thread)
    assert [each[0] for each in library.calls] == ["ncclCommAbort"]


def test_a_set_up_whose_peer_does_not_answer_ends_in_time(library: RecordedNccl) -> None:
    library.is_connected = False
    connecting, errors = started(
        lambda: nccl.connect(open_store(), Place(TARGET_RANK, "cuda:0", "peer", 0.01))
    )
    check_ended(connecting)
    assert errors == ["NCCL: not connected within 0.01 s"]


def test_a_process_has_one_communicator_and_another_one_after_its_end(
    library: RecordedNccl,
) -> None:
    first = connected()
    with pytest.raises(LinkError, match="another link of this process uses it"):
        connected()
    first.close()
    connected().close()


def test_a_failed_set_up_lets_another_one_begin(
    library: RecordedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.problem = "unhandled system error"
    with pytest.raises(LinkError, match="unhandled system error"):
        connected()
    library.problem = ""
    monkeypatch.setattr(nccl, "END_SECONDS", MAX_SECONDS)
    connected().close()


def test_a_link_without_a_thread_lets_another_one_begin(
    library: RecordedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_ends: NcclCommunicator) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(NcclCommunicator, "watch", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            connected()
    monkeypatch.setattr(nccl, "END_SECONDS", MAX_SECONDS)
    connected().close()
    assert [each[0] for each in library.calls].count("ncclCommAbort") == 4


def test_a_link_whose_device_fails_at_its_end_lets_another_one_begin(
    library: RecordedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_stream: Stream) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    first = connected()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "synchronize", fail)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            first.close()
    connected().close()


def test_posted_slots_stay_until_the_streams_have_ended(
    library: RecordedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = connected()
    slots = [ends.slot(4) for _ in range(2)]
    transfers = [ends.receive(slot) for slot in slots]
    first, second = (weakref.ref(slot) for slot in slots)
    transfers[0].wait()
    ends.abort()
    del slots, transfers
    assert first() is None
    is_there = []
    monkeypatch.setattr(Stream, "synchronize", lambda _self: is_there.append(second() is not None))
    ends.close()
    assert is_there == [True, True]
    assert second() is None


def test_the_path_is_that_of_the_newest_channel_in_the_log() -> None:
    assert path_of(LOG) == "NET/IB/0/GDRDMA"
    assert path_of("") == "NCCL"


def test_structures_have_the_sizes_of_nccl() -> None:
    assert ctypes.sizeof(nccl.UniqueId) == 128
    assert ctypes.sizeof(nccl.Config) == nccl.one_block_config().size == 40
