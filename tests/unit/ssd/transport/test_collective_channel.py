"""What a collective channel adds to the contract of channels: bounds, and what it releases."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
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
from ssd.threads import in_daemon_thread
from ssd.transport import collective_channel, gloo
from ssd.transport.collective_channel import MAX_OUTGOING, CollectiveChannel
from ssd.transport.communicator import Place, available_backends
from ssd.transport.frame import HEADER_WORDS, Frame, FrameKind, FrameLimits
from ssd.transport.gloo import GlooCommunicator, local_address
from ssd.transport.probe import probe
from ssd.transport.rendezvous import MAX_ENTRIES, LinkStore

LIMITS = FrameLimits(max_rows=8, max_width=4)
MAX_SECONDS = 20.0


def frame(number: int) -> Frame:
    return Frame(FrameKind.TABLES, 1, number, np.full((2, 3), number, dtype=np.int32))


@contextlib.asynccontextmanager
async def channels() -> AsyncIterator[tuple[CollectiveChannel, CollectiveChannel]]:
    async with joined() as (near, far):
        left, right = (CollectiveChannel(each, LIMITS, LIMITS) for each in (near, far))
        left.open()
        right.open()
        yield left, right
        for each in (left, right):
            each.close()
            await each.wait_closed()


def ignore(*_args: object) -> None: ...


async def test_a_closed_channel_holds_no_descriptor_and_no_thread() -> None:
    async with channels():
        pass
    before = held()
    for _ in range(3):
        async with channels() as (left, right):
            right.start(ignore, ignore)
            left.start(ignore, ignore)
            for number in range(10):
                left.send(frame(number))
        await until_released(before)


async def test_a_lost_channel_holds_nothing_before_it_is_closed() -> None:
    async with channels():
        pass
    before = held()
    async with joined() as (near, far):
        channel = CollectiveChannel(near, LIMITS, LIMITS)
        lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        channel.open()
        channel.start(ignore, lost.set_result)
        far.close()
        async with asyncio.timeout(MAX_SECONDS):
            assert "gloo connection is lost" in str(await lost)
            await channel.wait_closed()
        del near, far
    await until_released(before)


async def test_frames_to_a_peer_that_receives_none_are_refused_at_the_bound() -> None:
    async with joined() as (near, far):
        left = CollectiveChannel(near, LIMITS, LIMITS)
        left.open()
        left.start(ignore, ignore)
        for number in range(MAX_OUTGOING):
            left.send(frame(number))
        with pytest.raises(LinkError, match="64 wait to be sent"):
            left.send(frame(MAX_OUTGOING))
        left.close()
        async with asyncio.timeout(MAX_SECONDS):
            await left.wait_closed()
        far.close()


async def test_a_frame_that_claims_a_negative_shape_is_malformed() -> None:
    async with joined() as (near, far):
        right = CollectiveChannel(far, LIMITS, LIMITS)
        right.open()
        lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        right.start(ignore, lost.set_result)
        slot = near.slot(HEADER_WORDS)
        slot.words[:] = (0x53534446, 1, 2, 1, 1, -5, -7, 0)
        sending = near.send(slot, HEADER_WORDS)
        async with asyncio.timeout(MAX_SECONDS):
            assert isinstance(await lost, FrameError)
            await right.wait_closed()
        del sending
        near.close()


async def test_a_slow_reader_makes_the_peer_wait_and_loses_no_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective_channel, "MAX_UNDELIVERED", 2)
    async with channels() as (left, right):
        numbers: list[int] = []
        is_complete = asyncio.Event()

        def on_frame(received: Frame) -> None:
            numbers.append(received.sequence_number)
            if len(numbers) == 40:
                is_complete.set()

        left.start(ignore, ignore)
        right.start(on_frame, ignore)
        for number in range(40):
            left.send(frame(number))
        async with asyncio.timeout(MAX_SECONDS):
            await is_complete.wait()
        assert numbers == list(range(40))


async def test_a_communicator_is_measured() -> None:
    async with joined() as (near, far):
        ticks = iter(range(100))
        lock = threading.Lock()

        def now() -> float:
            with lock:
                return next(ticks) / 1000

        mine, _ = await asyncio.gather(
            asyncio.to_thread(probe, near, 0, now),
            asyncio.to_thread(probe, far, 1, lambda: 0.0),
        )
        assert mine.round_trip_seconds == pytest.approx(0.001)
        assert mine.bytes_per_second == pytest.approx(GlooCommunicator.num_probe_bytes / 0.001)
        near.close()
        far.close()


async def test_a_send_that_the_peer_asks_for_as_it_ends_ends_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "SEND_SECONDS", 0.3)
    with connections() as found:
        before = set(found)
    async with joined() as (near, far), asyncio.timeout(MAX_SECONDS):
        with connections() as found:
            of_pair = [each for key, each in found.items() if key not in before]
            sending = near.send(near.slot(64), 64)
            while not any(map(sent_bytes, of_pair)):  # noqa: ASYNC110
                await asyncio.sleep(0)
            here, there = sorted(of_pair, key=sent_bytes, reverse=True)
            # The far end asks for the message, and the near one cannot write it any more.
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            receiving = far.receive(far.slot(64))
            here.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkError, match="gloo connection is lost"):
                await in_daemon_thread(sending.wait)
        del sending, receiving
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

    monkeypatch.setattr(collective_channel, "decode", fail)
    monkeypatch.setattr(threading, "excepthook", ignore)
    async with joined() as (near, far):
        left, right = (CollectiveChannel(each, LIMITS, LIMITS) for each in (near, far))
        lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        for each in (left, right):
            each.open()
        left.start(ignore, ignore)
        right.start(ignore, lost.set_result)
        left.send(frame(1))
        async with asyncio.timeout(MAX_SECONDS):
            assert "no receiver" in str(await lost)
            for each in (left, right):
                each.close()
                await each.wait_closed()
