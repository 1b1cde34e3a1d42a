import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.handshake import HELLO
from tests.served import serving

from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.rpc import link as link_module
from ssd.rpc.client import DraftClient
from ssd.rpc.link import MAX_INCOMING, LinkCall, LinkServerCall, RateLimit
from ssd.rpc.link_codec import speculate_request
from ssd.speculation.table import row_width
from ssd.types import (
    CloseSession,
    DraftMessage,
    Draining,
    Heartbeat,
    OpenSession,
    SessionRefused,
    TargetMessage,
)
from ssd.v1 import speculation_pb2, speculation_pb2_grpc

Serve = Callable[[LinkServerCall], Awaitable[None]]


class Servicer(speculation_pb2_grpc.SpeculationServiceServicer):
    def __init__(self, serve: Serve) -> None:
        self.serve = serve

    async def Speculate(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        async with LinkServerCall(context) as call:
            await self.serve(call)


@contextlib.asynccontextmanager
async def linked(serve: Serve) -> AsyncIterator[LinkCall]:
    async with (
        serving(Servicer(serve)) as server,
        DraftClient(f"127.0.0.1:{server.port}") as client,
    ):
        link = await client.open_link()
        yield link
        await link.close()


def collecting(
    received: list[object], answer: Callable[[], DraftMessage | bytes | None] = lambda: None
) -> Serve:
    """Serve a link: collect its messages, and answer each."""

    async def serve(call: LinkServerCall) -> None:
        while (message := await call.receive()) is not None:
            received.append(message)
            if (answered := answer()) is not None:
                call.send(answered)

    return serve


async def receive_until_closed(call: LinkServerCall) -> None:
    while await call.receive() is not None:
        pass


def answering(*answers: DraftMessage | bytes) -> Serve:
    """Serve a link: send these messages after the first one of the target."""

    async def serve(call: LinkServerCall) -> None:
        await call.receive()
        for each in answers:
            call.send(each)
        await receive_until_closed(call)

    return serve


def ended_by(cause: Exception | None) -> Serve:
    """Serve a link: end it after the first message of the target."""

    async def serve(call: LinkServerCall) -> None:
        await call.receive()
        if cause is not None:
            raise cause

    return serve


async def test_messages_and_frames_arrive_in_order_from_any_thread() -> None:
    received: list[object] = []
    answers: list[DraftMessage | bytes] = [
        answer
        for number in range(1, 18)
        for answer in (SessionRefused(number, "max_sessions"), b"tables")
    ]
    sent: list[TargetMessage | bytes] = [HELLO, b"one", CloseSession(1), b"two", b""]
    sent += [CloseSession(number) for number in range(2, 31)]
    async with linked(collecting(received, lambda: answers[len(received) - 1])) as link:

        def send_all() -> None:
            for message in sent:
                link.send(message)

        await asyncio.to_thread(send_all)
        assert [await link.receive() for _ in sent] == answers
        assert link.num_openings == 0
    assert received == sent


async def test_receive_returns_none_after_the_peer_closed_the_link() -> None:
    endings: list[object] = []
    ended = asyncio.Event()

    async def serve(call: LinkServerCall) -> None:
        endings.extend([await call.receive(), await call.receive()])
        ended.set()

    async with linked(serve) as link:
        await link.close()
        await link.close()
        await ended.wait()
        assert await link.receive() is None
    assert endings == [None, None]


async def test_messages_sent_before_the_handler_returns_arrive() -> None:
    async def serve(call: LinkServerCall) -> None:
        for _ in range(20):
            call.send(Draining())

    async with linked(serve) as link:
        assert [await link.receive() for _ in range(20)] == [Draining()] * 20
        assert await link.receive() is None
        with pytest.raises(LinkError, match="closed the link"):
            link.send(Heartbeat())


async def test_a_refused_handshake_reaches_the_target_with_its_field() -> None:
    async with linked(ended_by(HandshakeError("lookahead", "6, not 8"))) as link:
        link.send(HELLO)
        for _ in range(2):
            with pytest.raises(HandshakeError, match="6, not 8") as caught:
                await link.receive()
            assert caught.value.field == "lookahead"


@pytest.mark.parametrize("cause", [FrameError("token id 250"), None])
async def test_the_cause_of_an_end_survives_writes_that_fail(cause: FrameError | None) -> None:
    async with serving(Servicer(ended_by(cause))) as server:
        for _ in range(20):
            async with DraftClient(f"127.0.0.1:{server.port}") as client:
                link = await client.open_link()
                for number in range(1, 200):
                    link.send(CloseSession(number))
                try:
                    ending: object = await link.receive()
                except LinkError as error:
                    ending = error
                await link.close()
            assert str(ending) == str(cause)


async def test_an_unreachable_draft_is_named_in_a_link_error() -> None:
    async with linked(receive_until_closed) as link:
        address = link.name
        await link.close()
    async with DraftClient(address) as client:
        link = await client.open_link()
        with pytest.raises(LinkError, match=address):
            await link.receive()
        with pytest.raises(LinkError, match=address):
            link.send(Heartbeat())
        await link.close()


async def test_a_draft_detects_a_lost_target() -> None:
    accepted, ended = asyncio.Event(), asyncio.Event()

    async def serve(call: LinkServerCall) -> None:
        accepted.set()
        try:
            await receive_until_closed(call)
        finally:
            ended.set()

    async with linked(serve) as link:
        await accepted.wait()
        link._call.cancel()
        await ended.wait()
        with pytest.raises(LinkError):
            await link.receive()


async def test_a_failed_link_raises_the_first_error_and_accepts_no_message() -> None:
    async with linked(receive_until_closed) as link:
        await asyncio.to_thread(link.fail, FrameError("a bad table"))
        link.fail(LinkError("another error"))
        for _ in range(2):
            with pytest.raises(FrameError, match="a bad table"):
                await link.receive()
        with pytest.raises(LinkError, match="a bad table"):
            link.send(Heartbeat())


class RecordedChannel:
    """Carries frames nowhere; refers to its link, as a channel does that reports its loss."""

    def __init__(self, link: LinkCall) -> None:
        self.link = link
        self.sent: list[tuple[bytes, int]] = []
        self.is_closed = False

    def send(self, frame: bytes, num_openings: int) -> None:
        self.sent.append((frame, num_openings))

    def opening_arrived(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    async def wait_closed(self) -> None:
        assert self.is_closed


@pytest.mark.parametrize("by_draft", [False, True])
async def test_an_ended_link_is_released_without_the_garbage_collector(*, by_draft: bool) -> None:
    gc.disable()
    try:
        async with linked(ended_by(FrameError("the end") if by_draft else None)) as link:
            link.use(RecordedChannel(link))
            if by_draft:
                link.send(HELLO)
            else:
                link.fail(LinkError("the end"))
            with pytest.raises(LinkError, match="the end"):
                await link.receive()
            released = weakref.ref(link)
            del link
        assert released() is None
    finally:
        gc.enable()


async def test_what_was_sent_before_this_end_failed_still_arrives() -> None:
    async def serve(call: LinkServerCall) -> None:
        await call.receive()
        call.send(Draining())
        call.fail(LinkError("the draft is shutting down"))
        await call.close()

    async with linked(serve) as link:
        link.send(HELLO)
        assert await link.receive() == Draining()


async def test_control_messages_renew_the_lease_and_frames_do_not() -> None:
    async def serve(call: LinkServerCall) -> None:
        while (message := await call.receive()) is not None:
            call.send(b"tables" if isinstance(message, bytes) else Heartbeat())

    async with linked(serve) as link:
        for message, is_renewed in ((b"commits", False), (HELLO, True)):
            link._control_at -= 1000.0
            link.send(message)
            await link.receive()
            assert (link.silent_seconds < 1000.0) is is_renewed


async def test_a_channel_carries_frames_with_the_number_of_openings_before_them() -> None:
    received: list[object] = []
    async with linked(collecting(received)) as link:
        link.use(channel := RecordedChannel(link))
        opening = OpenSession(session=1, token_ids=(2, 3), seed=9, temperature=0.0, max_len=9)
        for message in (b"one", HELLO, opening, CloseSession(1), Heartbeat(), b"two"):
            link.send(message)
    assert channel.sent == [(b"one", 0), (b"two", 1)]
    assert received == [HELLO, opening, CloseSession(1), Heartbeat()]
    assert channel.is_closed


async def test_send_raises_a_link_error_if_its_queue_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "MAX_OUTGOING", 3)
    async with linked(receive_until_closed) as link:
        for _ in range(3):
            link.send(Heartbeat())
        with pytest.raises(LinkError, match="3 wait to be sent"):
            link.send(Heartbeat())


async def test_too_many_unread_messages_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_OUTGOING", 2 * MAX_INCOMING)
    async with linked(answering(*[Heartbeat()] * (MAX_INCOMING + 1))) as link:
        link.send(HELLO)
        assert link._reader is not None
        await asyncio.wait({link._reader})
        assert [await link.receive() for _ in range(MAX_INCOMING)] == [Heartbeat()] * MAX_INCOMING
        with pytest.raises(FrameError, match="were not read"):
            await link.receive()


async def test_an_empty_message_ends_the_link_with_a_frame_error() -> None:
    async with linked(receive_until_closed) as link:
        await link._call.write(speculation_pb2.SpeculateRequest())
        with pytest.raises(FrameError, match="is empty"):
            await link.receive()


async def test_undecodable_bytes_end_the_link_but_not_the_server() -> None:
    async with linked(receive_until_closed) as link:
        client = DraftClient(link.name)
        raw: Any = client._channel
        call = raw.stream_stream("/ssd.v1.SpeculationService/Speculate")()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(Exception, match="cannot be decoded"):
            await call.read()
        await client.close()
        link.send(HELLO)
        await link.close()
        assert await link.receive() is None


async def test_cancelling_receive_loses_no_message() -> None:
    async with linked(answering(Draining())) as link:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await link.receive()
        link.send(HELLO)
        assert await link.receive() == Draining()


async def test_a_bug_in_the_reader_ends_the_link_and_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_frame: bytes) -> None:
        raise ZeroDivisionError("a bug")

    async with linked(answering(b"x")) as link:
        monkeypatch.setattr(link, "deliver", fail)
        link.send(HELLO)
        with pytest.raises(LinkError, match="failed"):
            await link.receive()
    assert "link_failed" in caplog.text


async def test_send_wakes_the_loop_only_if_its_queue_was_empty() -> None:
    async with linked(receive_until_closed) as link:
        wakes: list[object] = []
        link._call_in_loop = wakes.append  # type: ignore[method-assign, assignment]
        link.send(Heartbeat())
        link.send(Heartbeat())
        assert len(wakes) <= 1
        link._wake.set()


async def test_a_link_without_an_event_loop_refuses_messages() -> None:
    async with linked(receive_until_closed) as link:
        loop = asyncio.new_event_loop()
        loop.close()
        real, link._loop = link._loop, loop
        with pytest.raises(LinkError, match="no event loop"):
            await asyncio.to_thread(link._call_in_loop, lambda: None)
        link._loop = real


def test_the_rate_limit_applies_after_the_burst() -> None:
    rate_limit = RateLimit(per_second=100.0, burst=10.0)
    assert [rate_limit.spend(1.0, 5.0) for _ in range(10)] == [0.0] * 10
    assert rate_limit.spend(1.0, 5.0) == pytest.approx(0.01)
    assert rate_limit.spend(5.0, 5.01) == pytest.approx(0.05)
    assert rate_limit.spend(10.0, 60.0) == 0.0, "after a pause, one burst is allowed"
    assert rate_limit.spend(1.0, 60.0) == pytest.approx(0.01)


def test_the_rate_limit_does_not_delay_a_draft_with_64_sessions() -> None:
    rate_limit = RateLimit(link_module.MESSAGES_PER_SECOND, link_module.BURST_MESSAGES)
    num_bytes = 64 * (HELLO.branches + 1) * row_width(HELLO.lookahead) * 4
    units = num_bytes / link_module.UNIT_BYTES
    assert {rate_limit.spend(units, round_number / 300) for round_number in range(10_000)} == {0.0}


async def test_a_link_is_read_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MESSAGES_PER_SECOND", 0.1)
    monkeypatch.setattr(link_module, "BURST_MESSAGES", 10.0)
    async with linked(answering(*[Heartbeat()] * 100)) as link:
        link.send(HELLO)
        assert [await link.receive() for _ in range(11)] == [Heartbeat()] * 11
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await link.receive()


async def test_a_link_ends_if_its_peer_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "WRITE_SECONDS", 0.05)
    link_error: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(call: LinkServerCall) -> None:
        for _ in range(64):
            call.send(bytes(1 << 20))
        try:
            await receive_until_closed(call)
        except LinkError as error:
            link_error.set_result(str(error))
            raise

    async with linked(serve) as link:
        client = DraftClient(link.name)
        raw: Any = client._channel
        call = raw.stream_stream("/ssd.v1.SpeculationService/Speculate")()
        await call.write(speculate_request(Heartbeat()).SerializeToString())
        async with asyncio.timeout(60):
            assert "accepted no message for 0.05 s" in await link_error
        call.cancel()
        await client.close()


async def test_undecodable_bytes_of_a_draft_end_its_link_without_a_stack_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def speculate(_requests: object, context: Any) -> None:
        await context.write(b"\xff\xff")
        await context.read()

    handlers = {"Speculate": grpc.stream_stream_rpc_method_handler(speculate)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("ssd.v1.SpeculationService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with DraftClient(f"127.0.0.1:{port}") as client:
            link = await client.open_link()
            with pytest.raises(FrameError, match="cannot be decoded"):
                await link.receive()
            await link.close()
    finally:
        await server.stop(0)
    assert caplog.text == ""


async def test_close_raises_nothing_if_the_peer_disconnects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail() -> None:
        raise grpc.aio.InternalError("the call has ended")

    async with linked(receive_until_closed) as link:
        monkeypatch.setattr(link._call, "done_writing", fail)
        await link.close()
