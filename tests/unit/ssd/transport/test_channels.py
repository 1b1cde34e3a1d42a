"""The contract of tensor channels. A new channel is one more entry of ``ENDS``."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.unit.ssd.transport.gloo_pair import joined

from ssd.errors import FrameError, LinkError
from ssd.rpc.client import DraftClient
from ssd.rpc.link import LinkFrames, LinkServerCall
from ssd.rpc.server import RpcServer
from ssd.testing.stream import memory_streams
from ssd.transport.collective_channel import CollectiveChannel
from ssd.transport.communicator import Transfer
from ssd.transport.frame import WORD_BYTES, Frame, FrameKind, FrameLimits, TensorChannel, encode
from ssd.transport.grpc_channel import GrpcChannel
from ssd.transport.inprocess import pair
from ssd.v1 import speculation_pb2_grpc

LIMITS = FrameLimits(max_rows=8, max_width=4)


@dataclass
class Ends:
    """Two connected ends. The tests send frames from left to right."""

    left: TensorChannel
    right: TensorChannel
    inject: Callable[[bytes], None]
    """Delivers bytes at the right end."""
    kill_left: Callable[[], object]
    """Ends the left process without closing the link."""


@dataclass
class Receiver:
    """Records what arrives at one end."""

    frames: list[Frame] = field(default_factory=list)
    losses: list[Exception] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, channel: TensorChannel) -> "Receiver":
        channel.start(self.on_frame, self.on_lost)
        return self

    def on_frame(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.changed.set()

    def on_lost(self, error: Exception) -> None:
        self.losses.append(error)
        self.changed.set()

    async def wait(self, num_frames: int = 0, num_losses: int = 0) -> None:
        while len(self.frames) < num_frames or len(self.losses) < num_losses:
            self.changed.clear()
            await self.changed.wait()

    @property
    def numbers(self) -> list[int]:
        return [frame.sequence_number for frame in self.frames]


@contextlib.asynccontextmanager
async def inprocess_ends() -> AsyncIterator[Ends]:
    left, right = pair(LIMITS)
    yield Ends(left, right, right.deliver, lambda: right.lose(LinkError("left failed")))


@contextlib.asynccontextmanager
async def memory_ends() -> AsyncIterator[Ends]:
    left, right = memory_streams()
    yield Ends(
        GrpcChannel(left, LIMITS),
        GrpcChannel(right, LIMITS),
        left.send,
        lambda: right.lose(LinkError("left failed")),
    )


class HoldingServicer(speculation_pb2_grpc.SpeculationServiceServicer):
    """Holds the link until it ends."""

    def __init__(self) -> None:
        self.accepted: asyncio.Future[LinkServerCall] = asyncio.get_running_loop().create_future()

    async def Speculate(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        async with LinkServerCall(context) as call:
            self.accepted.set_result(call)
            while await call.receive() is not None:
                pass


@contextlib.asynccontextmanager
async def grpc_ends() -> AsyncIterator[Ends]:
    servicer = HoldingServicer()
    server = RpcServer("127.0.0.1", 0)
    server.add(
        "ssd.v1.SpeculationService",
        partial(speculation_pb2_grpc.add_SpeculationServiceServicer_to_server, servicer),
    )
    await server.start()
    try:
        async with DraftClient(f"127.0.0.1:{server.port}") as client:
            link = await client.open_link()
            far = await servicer.accepted
            yield Ends(
                GrpcChannel(LinkFrames(link), LIMITS),
                GrpcChannel(LinkFrames(far), LIMITS),
                link.send,
                link._call.cancel,
            )
            await link.close()
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def collective_ends() -> AsyncIterator[Ends]:
    async with joined() as (near, far):
        left, right = (CollectiveChannel(each, LIMITS, LIMITS) for each in (near, far))
        left.open()
        right.open()

        sending: list[Transfer] = []

        def inject(payload: bytes) -> None:
            slot = near.slot(len(payload) // WORD_BYTES + 1)
            slot.tensor.fill_(0)
            slot.words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
            sending.append(near.send(slot, len(slot.words)))

        yield Ends(left, right, inject, near.abort)
        left.close()
        right.close()
        await left.wait_closed()
        await right.wait_closed()


ENDS = {
    "inprocess": inprocess_ends,
    "memory": memory_ends,
    "grpc": grpc_ends,
    "collective": collective_ends,
}


@pytest.fixture(params=ENDS)
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    async with ENDS[request.param]() as both:
        yield both


def frame(number: int, rows: int = 2) -> Frame:
    rows_RW = np.full((rows, 3), number, dtype=np.int32)
    return Frame(FrameKind.COMMITS, 1, number, rows_RW)


async def test_frames_arrive_whole_and_in_order_both_ways(ends: Ends) -> None:
    left, right = Receiver().start(ends.left), Receiver().start(ends.right)
    for number in range(50):
        ends.left.send(frame(number))
        ends.right.send(frame(1000 + number))
    await right.wait(50)
    await left.wait(50)
    assert right.numbers == list(range(50))
    assert left.numbers == list(range(1000, 1050))
    assert all(np.all(each.rows_RW == each.sequence_number) for each in right.frames)
    assert not right.losses + left.losses


async def test_a_frame_that_arrives_before_the_start_ends_the_channel(ends: Ends) -> None:
    left = Receiver().start(ends.left)
    ends.left.send(frame(1))
    await left.wait(num_losses=1)
    right = Receiver().start(ends.right)
    await right.wait(num_losses=1)
    assert isinstance(right.losses[0], LinkError)
    assert not right.frames


async def test_frames_may_be_sent_from_any_thread(ends: Ends) -> None:
    Receiver().start(ends.left)
    right = Receiver().start(ends.right)

    def send_all() -> None:
        for number in range(20):
            ends.left.send(frame(number))

    await asyncio.to_thread(send_all)
    await right.wait(20)
    assert right.numbers == list(range(20))


async def test_a_frame_that_a_peer_sends_twice_arrives_twice(ends: Ends) -> None:
    Receiver().start(ends.left)
    right = Receiver().start(ends.right)
    for number in (1, 1, 2):
        ends.left.send(frame(number))
    await right.wait(3)
    assert right.numbers == [1, 1, 2]


async def test_a_failed_peer_is_reported_once_and_accepts_no_more_frames(ends: Ends) -> None:
    Receiver().start(ends.left)
    right = Receiver().start(ends.right)
    ends.kill_left()
    await right.wait(num_losses=1)
    with pytest.raises(LinkError):
        ends.right.send(frame(1))
    ends.right.close()
    assert len(right.losses) == 1
    assert isinstance(right.losses[0], LinkError)


async def test_closing_twice_is_allowed_and_only_the_other_end_is_notified(ends: Ends) -> None:
    left, right = Receiver().start(ends.left), Receiver().start(ends.right)
    ends.left.close()
    ends.left.close()
    await right.wait(num_losses=1)
    ends.right.close()
    assert len(right.losses) == 1
    assert left.losses == []


async def test_frames_sent_before_a_close_still_arrive(ends: Ends) -> None:
    Receiver().start(ends.left)
    right = Receiver().start(ends.right)
    for number in range(20):
        ends.left.send(frame(number))
    ends.left.close()
    await right.wait(20, num_losses=1)
    assert right.numbers == list(range(20))


async def test_sending_after_the_own_close_is_a_link_error(ends: Ends) -> None:
    Receiver().start(ends.left)
    ends.left.close()
    with pytest.raises(LinkError):
        ends.left.send(frame(1))


async def test_malformed_bytes_close_the_channel_at_both_ends(ends: Ends) -> None:
    left, right = Receiver().start(ends.left), Receiver().start(ends.right)
    ends.inject(b"no frame at all")
    await right.wait(num_losses=1)
    await left.wait(num_losses=1)
    assert isinstance(right.losses[0], FrameError)
    assert right.frames == []
    with pytest.raises(LinkError):
        ends.right.send(frame(1))


async def test_an_oversize_frame_is_rejected_by_its_receiver(ends: Ends) -> None:
    Receiver().start(ends.left)
    right = Receiver().start(ends.right)
    ends.inject(encode(frame(1, rows=9), FrameLimits()))
    await right.wait(num_losses=1)
    assert isinstance(right.losses[0], FrameError)
    assert "9 rows of 3, allowed are 8 of 4" in str(right.losses[0])


async def test_an_oversize_frame_that_its_sender_rejects_keeps_the_channel_open(
    ends: Ends,
) -> None:
    Receiver().start(ends.left)
    right = Receiver().start(ends.right)
    with pytest.raises(FrameError, match="allowed are 8 of 4"):
        ends.left.send(frame(1, rows=9))
    ends.left.send(frame(2))
    await right.wait(1)
    assert right.numbers == [2]


async def test_nothing_follows_a_loss(ends: Ends) -> None:
    Receiver().start(ends.left)
    right = Receiver().start(ends.right)
    ends.inject(b"no frame at all")
    with contextlib.suppress(LinkError):
        ends.inject(encode(frame(3)))
    await right.wait(num_losses=1)
    await asyncio.to_thread(int)
    assert right.frames == []
    assert len(right.losses) == 1
