"""What NCCL is called with, and what ends a communicator. The library and the GPU are replaced."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.ssd.transport.fake_nccl import (
    MAX_SECONDS,
    FakeNccl,
    Handle,
    Stream,
    connected,
    fake_nccl,
    open_store,
)
from tests.unit.ssd.transport.gloo_pair import stores

from ssd.errors import LinkError
from ssd.transport import nccl
from ssd.transport.communicator import DRAFT_RANK, TARGET_RANK, Place
from ssd.transport.nccl import NcclCommunicator, path_of
from ssd.transport.rendezvous import LinkStore

CONFIG = SimpleNamespace(blocking=False, max_ctas=1)
LOG = """\
host:7:91 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[0] via SHM/direct/direct
host:7:91 [0] NCCL INFO Connected all rings
host:7:98 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
host:7:98 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""


def send(ends: NcclCommunicator) -> None:
    ends.start_send(ends.buffer(4), 4)
    ends.end_send()


def receive(ends: NcclCommunicator) -> None:
    ends.start_receive(ends.buffer(4))
    ends.end_receive()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    with fake_nccl(monkeypatch) as made:
        yield made


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


async def test_messages_arrive_both_ways_on_a_communicator_and_a_stream_for_each_direction(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_one_link", threading.Semaphore(2))
    near, far = await asyncio.gather(
        *(
            asyncio.to_thread(connected, rank, store)
            for rank, store in zip((TARGET_RANK, DRAFT_RANK), stores(), strict=True)
        )
    )
    for sender, receiver in ((near, far), (far, near)):
        sent, received = sender.buffer(4), receiver.buffer(4)
        sent.words[:] = 1, 2, 3, 4
        sender.start_send(sent, 2)
        sender.end_send()
        receiver.start_receive(received)
        receiver.end_receive()
        assert np.array_equal(received.words, (1, 2, 3, 4)), "NCCL sends whole buffers"
    used = [each.calls for each in library.handles]
    streams = {stream for calls in used for _, _, stream in calls}
    assert sorted(len(calls) for calls in used) == [1, 1, 1, 1]
    assert len(streams) == 4
    assert library.num_ids == 2, "both ends use the ids of the target"
    near.abort()
    far.abort()
    near.close()
    far.close()


def test_the_memory_of_a_buffer_is_used_only_after_kernels_that_were_queued_before(
    library: FakeNccl,
) -> None:
    ends = connected()
    ended: list[str] = []
    queues: Any = [torch.cuda.current_stream(ends._device)]
    queues += [way.stream for way in ends._directions]
    queues[0].operations.put(lambda: ended.append("kernel"))
    ends.buffer(4)
    for each in queues[1:]:
        each.operations.put(lambda: ended.append("message"))
    for each in queues[1:]:
        each.synchronize()
    assert ended == ["kernel", "message", "message"]


def test_an_id_of_another_size_is_refused(library: FakeNccl) -> None:
    store = LinkStore(lambda _key, _value: None, 1.0)
    store.put("nccl/0", b"short")
    with pytest.raises(LinkError, match="must be 128 bytes"):
        connected(DRAFT_RANK, store)


def test_an_abort_ends_a_receive_and_refuses_what_follows(library: FakeNccl) -> None:
    ends = connected()
    buffer = ends.buffer(4)
    waiting, errors = started(lambda: receive(ends))
    ends.abort()
    check_ended(waiting)
    closing, _ = started(ends.close)
    check_ended(closing)
    assert errors == ["the NCCL connection was aborted"]
    assert all(each.is_aborted for each in library.handles)
    for refused in (
        partial(ends.start_send, buffer, 4),
        partial(ends.start_receive, buffer),
        ends.check,
    ):
        with pytest.raises(LinkError, match="aborted"):
            refused()


def test_a_check_reports_an_error_of_the_network(library: FakeNccl) -> None:
    ends = connected()
    ends.check()
    library.problem = "a remote process has ended"
    with pytest.raises(LinkError, match="NCCL: a remote process has ended"):
        ends.check()
    ends.close()


def test_an_abort_does_not_wait_for_nccl(library: FakeNccl) -> None:
    ends = connected()
    other = library.init(2, TARGET_RANK, b"of another link", CONFIG)
    ends.abort()
    with pytest.raises(LinkError, match="aborted"):
        receive(ends)
    assert threading.current_thread() not in {each.aborted_on for each in library.handles}
    other.abort()
    ends.close()


def test_a_message_that_nccl_starts_on_its_thread_is_sent_without_a_pause(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = connected()
    library.checks_until_started = 3
    monkeypatch.setattr(nccl, "POLL_SECONDS", 10 * MAX_SECONDS)
    monkeypatch.setattr(nccl, "SPIN_SECONDS", MAX_SECONDS)
    sending, errors = started(lambda: send(ends))
    check_ended(sending)
    assert errors == []
    ends.close()


def test_a_message_does_not_wait_long_for_one_that_nccl_does_not_start(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "LATE_SECONDS", 0.01)
    ends = connected()
    ends.start_send(ends.buffer(4), 4)
    library.has_peer = False
    with pytest.raises(LinkError, match=r"not started a message within 0\.01 s"):
        ends.start_send(ends.buffer(4), 4)
    ends.close()


def test_an_abort_ends_a_first_message_whose_peer_does_not_answer(library: FakeNccl) -> None:
    ends = connected()
    library.has_peer = False
    sending, errors = started(lambda: send(ends))
    assert library.asked.wait(MAX_SECONDS)
    ends.abort()
    check_ended(sending)
    assert errors == ["the NCCL connection was aborted"]
    ends.close()


def test_an_abort_returns_while_a_call_of_nccl_blocks(library: FakeNccl) -> None:
    ends = connected()
    library.blocks = "send"
    sending, _ = started(lambda: send(ends))
    assert library.blocked_call.wait(MAX_SECONDS)
    aborting, _ = started(ends.abort)
    check_ended(aborting)
    check_ended(sending)
    ends.close()


def test_a_closed_store_ends_a_set_up_whose_peer_does_not_answer(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.has_peer = False
    store = open_store()
    connecting, errors = started(lambda: connected(store=store))
    assert library.asked.wait(MAX_SECONDS)
    store.close("the link is lost")
    check_ended(connecting)
    assert errors == ["the link is lost"]
    library.has_peer = True
    monkeypatch.setattr(nccl, "END_SECONDS", MAX_SECONDS)
    connected().close()
    assert all(each.is_aborted for each in library.handles)


def test_a_set_up_whose_peer_does_not_answer_ends_in_time(library: FakeNccl) -> None:
    library.has_peer = False
    with pytest.raises(LinkError, match=r"NCCL: not connected within 0\.01 s"):
        nccl.connect(open_store(), Place(TARGET_RANK, "cuda:0", "peer", 0.01))


def test_a_process_has_one_communicator_and_another_one_after_its_end(library: FakeNccl) -> None:
    first = connected()
    with pytest.raises(LinkError, match="another link of this process uses it"):
        connected()
    first.close()
    connected().close()


def test_a_failed_set_up_lets_another_one_begin(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.problem = "unhandled system error"
    with pytest.raises(LinkError, match="unhandled system error"):
        connected()
    library.problem = ""
    monkeypatch.setattr(nccl, "END_SECONDS", MAX_SECONDS)
    connected().close()


def test_a_runtime_error_in_a_call_is_a_link_error(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_handle: Handle) -> int:
        raise RuntimeError("the driver library is not there")

    ends = connected()
    with monkeypatch.context() as patch, contextlib.closing(ends):
        patch.setattr(Handle, "get_async_error", fail)
        with pytest.raises(LinkError, match="NCCL: the driver library"):
            ends.check()


def test_a_link_whose_device_fails_at_its_end_lets_another_one_begin(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_stream: Stream) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    first = connected()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "synchronize", fail)
        with pytest.raises(LinkError, match="CUDA: an illegal memory access"):
            send(first)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            first.close()
    connected().close()


def test_buffers_stay_until_the_streams_have_ended(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = connected()
    send(ends)
    ended, buffer = weakref.ref(ends.buffer(4)), ends.buffer(4)
    ends.start_send(buffer, 4)
    sending = weakref.ref(buffer)
    del buffer
    assert ended() is None
    is_there = []
    monkeypatch.setattr(Stream, "synchronize", lambda _self: is_there.append(bool(sending())))
    ends.close()
    assert is_there == [True, True]


def test_a_communicator_is_closed_when_all_aborts_have_ended(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = connected()
    other = library.init(2, TARGET_RANK, b"of another link", CONFIG)
    aborts = [started(ends.abort)[0] for _ in range(8)]
    closing, _ = started(ends.close)
    for each in aborts:
        check_ended(each)
    with pytest.raises(LinkError, match="another link of this process uses it"):
        connected()
    other.abort()
    check_ended(closing)
    connected().close()


def test_a_device_without_memory_is_a_link_error(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise RuntimeError("CUDA out of memory")

    ends = connected()
    with monkeypatch.context() as patch, contextlib.closing(ends):
        patch.setattr(nccl, "NcclBuffer", refuse)
        with pytest.raises(LinkError, match="CUDA out of memory"):
            ends.buffer(4)


def test_nccl_is_available_if_its_package_finds_it(
    library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not nccl.is_available("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for found, is_available in ((None, False), ("2.32", True)):
        nccl.has_nccl.cache_clear()
        library.version = found
        assert nccl.is_available("cuda:0") == is_available
    assert not nccl.is_available("cpu")
    nccl.has_nccl.cache_clear()


def test_the_path_is_that_of_the_newest_channel_in_the_log() -> None:
    assert path_of(LOG) == "NET/IB/0/GDRDMA"
    assert path_of("") == "NCCL"
