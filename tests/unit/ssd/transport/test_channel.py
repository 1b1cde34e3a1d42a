"""A collective channel: order, bounds, losses, and what it releases."""

import asyncio
import contextlib
import itertools
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.unit.ssd.transport.gloo_pair import (
    connections,
    held,
    joined,
    place,
    sent_bytes,
    stores,
    until_released,
)

from ssd.errors import FrameError, LinkError
from ssd.runtime.threads import in_daemon_thread
from ssd.transport import channel, gloo
from ssd.transport.channel import HEADER_WORDS, MAX_OUTGOING, CollectiveChannel
from ssd.transport.communicator import Buffer, Communicator, Place, available_backends
from ssd.transport.gloo import local_address
from ssd.transport.probe import ChannelQuality, probe
from ssd.transport.rendezvous import MAX_ENTRIES, LinkStore
from ssd.transport.setup import check_speed

MAX_BYTES = 128
MAX_SECONDS = 20.0


def frame(number: int) -> bytes:
    return np.full(6, number, dtype=np.int32).tobytes()


@dataclass
class FakeLink:
    """Records what a channel delivers."""

    name: str = "peer"
    num_openings: int = 0
    frames: list[bytes] = field(default_factory=list)
    errors: list[LinkError] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, received: bytes) -> None:
        self.frames.append(received)
        self.changed.set()

    def fail(self, error: LinkError) -> None:
        self.errors.append(error)
        self.changed.set()

    async def wait(self, num_frames: int = 0, num_errors: int = 0) -> None:
        async with asyncio.timeout(MAX_SECONDS):
            while len(self.frames) < num_frames or len(self.errors) < num_errors:
                self.changed.clear()
                await self.changed.wait()


class FakeCommunicator:
    """Receives without end, sends nothing, and has the errors that a test sets."""

    transport, num_probe_bytes = "fake", 4

    def __init__(self) -> None:
        self.problem = self.close_problem = ""
        self.num_received = 0
        self.receives = threading.Semaphore(0)
        self.ended = threading.Event()

    def buffer(self, num_words: int) -> Any:
        return SimpleNamespace(words=np.zeros(num_words, dtype=np.int32))

    def start_send(self, _buffer: Buffer, _num_words: int) -> None: ...

    def end_send(self) -> None:
        self.ended.wait(MAX_SECONDS)
        raise LinkError("aborted")

    def start_receive(self, _buffer: Buffer) -> None: ...

    def end_receive(self) -> None:
        self.receives.acquire()
        if self.ended.is_set():
            raise LinkError("aborted")
        self.num_received += 1

    def check(self) -> None:
        if self.problem:
            raise LinkError(self.problem)

    def abort(self) -> None:
        self.ended.set()
        self.receives.release()

    def close(self) -> None:
        if self.close_problem:
            raise RuntimeError(self.close_problem)


class End(CollectiveChannel):
    """One end, and its link."""

    def __init__(self, communicator: Communicator) -> None:
        self.link = FakeLink()
        super().__init__(communicator, cast(Any, self.link), MAX_BYTES, MAX_BYTES)
        self.open()

    async def end(self) -> None:
        self.close()
        async with asyncio.timeout(MAX_SECONDS):
            await self.wait_closed()


@contextlib.asynccontextmanager
async def channels() -> AsyncIterator[tuple[End, End]]:
    async with joined() as (near, far):
        left, right = End(near), End(far)
        yield left, right
        await left.end()
        await right.end()


def ignore(*_args: object) -> None: ...


async def test_frames_arrive_whole_and_in_order_both_ways_from_any_thread() -> None:
    async with channels() as (left, right):
        sent = [frame(number) for number in range(50)]

        def send_all() -> None:
            for each in sent:
                left.send(each, 0)
                right.send(each, 0)

        await asyncio.to_thread(send_all)
        await right.link.wait(50)
        await left.link.wait(50)
        assert left.link.frames == right.link.frames == sent


async def test_a_frame_waits_for_the_openings_that_were_sent_before_it() -> None:
    async with channels() as (left, right):
        for number in (0, 2, 1):
            left.send(frame(number), number)
        await right.link.wait(1)
        right.link.num_openings = 1
        right.opening_arrived()
        await asyncio.sleep(0)
        assert right.link.frames == [frame(0)]
        right.link.num_openings = 2
        right.opening_arrived()
        await right.link.wait(3)
        assert right.link.frames == [frame(0), frame(2), frame(1)]


async def test_a_frame_after_openings_that_never_arrive_ends_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "LEASE_SECONDS", 0.05)
    async with channels() as (left, right):
        left.send(frame(0), 2**31 - 1)
        await right.link.wait(num_errors=1)
        assert "follows 2147483647 openings, 0 arrived" in str(right.link.errors[0])
        assert not right.link.frames


async def test_frames_sent_before_a_close_still_arrive_and_only_the_peer_is_notified() -> None:
    async with channels() as (left, right):
        for number in range(20):
            left.send(frame(number), 0)
        left.close()
        left.close()
        await right.link.wait(20, num_errors=1)
        assert len(right.link.frames) == 20
        assert left.link.errors == []
        with pytest.raises(LinkError, match="closed"):
            left.send(frame(1), 0)


async def test_a_frame_of_a_wrong_size_is_refused_by_its_sender_and_the_channel_stays() -> None:
    async with channels() as (left, right):
        with pytest.raises(FrameError, match="132 bytes, allowed are 128"):
            left.send(bytes(MAX_BYTES + 4), 0)
        with pytest.raises(FrameError, match="5 bytes, not words of 4"):
            left.send(b"abcde", 0)
        left.send(bytes(MAX_BYTES), 0)
        await right.link.wait(1)


@pytest.mark.parametrize("header", [(-4, 0), (MAX_BYTES + 4, 0), (3, 0), (4, -1)])
async def test_a_malformed_header_ends_the_link(header: tuple[int, int]) -> None:
    async with joined() as (near, far):
        right = End(far)
        message = near.buffer(HEADER_WORDS)
        message.words[:] = header
        with contextlib.suppress(LinkError):
            near.start_send(message, HEADER_WORDS)
            await in_daemon_thread(near.end_send)
        await right.link.wait(num_errors=1)
        assert isinstance(right.link.errors[0], FrameError)
        assert right.link.frames == []
        with pytest.raises(LinkError):
            right.send(frame(1), 0)
        await right.end()
        near.close()


async def test_a_closed_channel_holds_no_descriptor_and_no_thread() -> None:
    async with channels():
        pass
    before = held()
    for _ in range(3):
        async with channels() as (left, _):
            for number in range(10):
                left.send(frame(number), 0)
        await until_released(before)


async def test_a_lost_channel_holds_nothing_before_it_is_closed() -> None:
    async with channels():
        pass
    before = held()
    async with joined() as (near, far):
        end = End(near)
        far.close()
        await end.link.wait(num_errors=1)
        assert "gloo connection is lost" in str(end.link.errors[0])
        async with asyncio.timeout(MAX_SECONDS):
            await end.wait_closed()
        del near, far
    await until_released(before)


async def test_frames_to_a_peer_that_receives_none_are_refused_at_the_bound() -> None:
    async with joined() as (near, far):
        left = End(near)
        frames = map(frame, range(MAX_OUTGOING + 1))
        with pytest.raises(LinkError, match="64 wait to be sent"):
            deque(map(partial(left.send, num_openings=0), frames), 0)
        await left.end()
        far.close()


async def test_a_slow_reader_makes_the_peer_wait_and_loses_no_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "MAX_UNDELIVERED", 2)
    communicator = FakeCommunicator()
    end = End(communicator)
    communicator.receives.release(4)
    # The loop does not run meanwhile.
    end._receiver.join(0.05)
    assert communicator.num_received <= 3
    await end.link.wait(4)
    await end.end()
    async with channels() as (left, right):
        for number in range(40):
            left.send(frame(number), 0)
        await right.link.wait(40)
        assert right.link.frames == [frame(number) for number in range(40)]


async def test_an_error_of_the_network_ends_the_link_while_a_frame_is_sent() -> None:
    communicator = FakeCommunicator()
    end = End(communicator)
    end.send(frame(1), 0)
    communicator.problem = "remote process exited"
    await end.link.wait(num_errors=1)
    assert str(end.link.errors[0]) == "remote process exited"
    await end.end()


async def test_a_device_that_fails_at_the_end_does_not_delay_the_close() -> None:
    communicator = FakeCommunicator()
    communicator.close_problem = "an illegal memory access was encountered"
    end = End(communicator)
    await end.end()
    assert end._closed.is_set()


async def test_a_communicator_and_the_stream_of_its_link_are_measured() -> None:
    async with joined() as (near, far):
        ticks = itertools.count()
        store, other = stores()
        mine, _ = await asyncio.gather(
            in_daemon_thread(partial(probe, near, store, 0, lambda: next(ticks) / 1000, ignore)),
            in_daemon_thread(partial(probe, far, other, 1, lambda: 0.0, ignore)),
        )
        assert mine.round_trip_seconds == pytest.approx(0.001)
        assert mine.grpc_seconds == pytest.approx(0.001)
        assert mine.bytes_per_second == pytest.approx(near.num_probe_bytes / 0.001)
        near.close()
        far.close()


def test_a_connection_that_is_not_faster_than_the_stream_is_refused() -> None:
    as_fast = ChannelQuality(round_trip_seconds=1e-4, grpc_seconds=1e-4, bytes_per_second=1e9)
    check_speed("nccl", replace(as_fast, round_trip_seconds=99e-6))
    with pytest.raises(LinkError, match="nccl: a round trip takes 100 us, over gRPC 100 us"):
        check_speed("nccl", as_fast)


async def test_a_send_that_the_peer_asks_for_as_it_ends_ends_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "SEND_SECONDS", 0.3)
    with connections() as found:
        before = set(found)
    async with joined() as (near, far), asyncio.timeout(MAX_SECONDS):
        with connections() as found:
            of_pair = {each: sent_bytes(each) for key, each in found.items() if key not in before}
            near.start_send(near.buffer(64), 64)
            sent: list[socket.socket] = []
            while not sent:
                await asyncio.sleep(0)
                sent = [each for each, num in of_pair.items() if sent_bytes(each) > num]
            (here,) = sent
            (there,) = of_pair.keys() - {here}
            # The far end asks for the message, and the near one cannot write it any more.
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            receiving = far._group.recv([torch.empty(64, dtype=torch.int32)], 0, 0)
            here.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkError, match="gloo connection is lost"):
                await in_daemon_thread(near.end_send)
            del receiving
        near.close()
        far.close()


async def test_a_peer_that_ends_before_it_connects_is_waited_for_once() -> None:
    entries: dict[str, bytes] = {}
    near = LinkStore(lambda _key, _value: None, 1.0)
    far = LinkStore(entries.__setitem__, 1.0)
    with pytest.raises(LinkError, match="no rendezvous entry"):
        gloo.connect(far, place(0, 1.0))
    for key, entry in entries.items():
        near.put(key, entry)
    async with asyncio.timeout(4.0):
        with pytest.raises(LinkError, match="gloo does not connect"):
            await in_daemon_thread(lambda: gloo.connect(near, place(1, 1.0)))


async def test_gloo_without_a_peer_fails_in_time_and_leaves_nothing() -> None:
    with pytest.raises(LinkError, match="no rendezvous entry"):
        gloo.connect(stores(0.05)[0], place(0, 0.05))
    before = held()
    with pytest.raises(
        LinkError, match=r"gloo does not connect: no rendezvous entry .* within 0.05"
    ):
        gloo.connect(stores(0.05)[0], place(0, 0.05))
    await until_released(before)


def test_a_host_that_is_unknown_is_a_link_error() -> None:
    with pytest.raises(LinkError, match="gloo does not connect"):
        gloo.connect(stores()[0], Place(0, "cpu", "no-such-host.invalid", 1.0))


def test_the_local_address_is_of_the_family_of_the_peer() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("localhost") == "127.0.0.1"


def test_every_torch_has_gloo_and_a_cpu_no_nccl() -> None:
    assert available_backends("cpu") == ("gloo",)


def test_a_closed_store_ends_a_wait() -> None:
    store, _ = stores()
    closing = threading.Timer(0.0, store.close, ("the link has ended",))
    closing.start()
    with pytest.raises(LinkError, match="the link has ended"):
        store.get("missing")
    closing.join()


def test_a_peer_cannot_fill_the_store() -> None:
    store = LinkStore(ignore, 1.0)
    for number in range(2 * MAX_ENTRIES):
        store.put(str(number), b"")
    with pytest.raises(FrameError, match="more than 64 entries"):
        store.put("one more", b"")


async def test_a_bug_in_a_thread_of_the_channel_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(threading, "excepthook", ignore)
    async with channels() as (left, right):
        monkeypatch.setattr(right, "_content", fail)
        left.send(frame(1), 0)
        await right.link.wait(num_errors=1)
        assert "no receiver" in str(right.link.errors[0])
