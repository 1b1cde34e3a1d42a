import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.rpc import link as link_module
from ssd.rpc.client import DraftClient
from ssd.rpc.link import MAX_INCOMING, LinkCall, LinkFrames, LinkServerCall
from ssd.rpc.link_codec import speculate_request
from ssd.rpc.link_life import Allowance
from ssd.rpc.server import RpcServer
from ssd.speculation.table import row_width
from ssd.types import (
    WIRE_VERSION,
    Draining,
    Heartbeat,
    LinkHello,
    SessionClosing,
    SessionRefusal,
    TargetMessage,
)
from ssd.v1 import speculation_pb2, speculation_pb2_grpc

HELLO = LinkHello(
    wire_version=WIRE_VERSION,
    vocab_size=10,
    tokenizer_fingerprint="f",
    lookahead=6,
    branches=24,
    channel="grpc",
    epoch=1,
)
Serve = Callable[[LinkServerCall], Awaitable[None]]


class Servicer(speculation_pb2_grpc.SpeculationServiceServicer):
    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.calls = 0

    async def Speculate(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        self.calls += 1
        async with LinkServerCall(context, 2 * MAX_INCOMING) as call:
            await self.serve(call)


@contextlib.asynccontextmanager
async def linked(serve: Serve, max_outgoing: int = 1024) -> AsyncIterator[LinkCall]:
    server = RpcServer("127.0.0.1", 0)
    register = speculation_pb2_grpc.add_SpeculationServiceServicer_to_server
    server.add("ssd.v1.SpeculationService", partial(register, Servicer(serve)))
    await server.start()
    try:
        async with DraftClient(f"127.0.0.1:{server.port}") as client:
            link = await client.open_link(max_outgoing)
            yield link
            await link.close()
    finally:
        await server.stop(0)


async def listen_until_goodbye(call: LinkServerCall) -> None:
    while await call.receive() is not None:
        pass


async def test_messages_arrive_typed_and_in_order() -> None:
    heard: list[object] = []

    async def serve(call: LinkServerCall) -> None:
        while (message := await call.receive()) is not None:
            heard.append(message)
            call.send(SessionRefusal(len(heard), "max_sessions"))

    async with linked(serve) as link:
        sent: list[TargetMessage] = [HELLO, *(SessionClosing(number) for number in range(1, 30))]
        for message in sent:
            link.send(message)
        answers = [await link.receive() for _ in sent]
    assert heard == sent
    assert answers == [SessionRefusal(number, "max_sessions") for number in range(1, 31)]


async def test_a_goodbye_is_none_at_the_other_end_for_ever() -> None:
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


async def test_a_handler_that_returns_says_goodbye_after_its_last_word() -> None:
    async def serve(call: LinkServerCall) -> None:
        for _ in range(20):
            call.send(Draining())

    async with linked(serve) as link:
        assert [await link.receive() for _ in range(20)] == [Draining()] * 20
        assert await link.receive() is None
        with pytest.raises(LinkError, match="closed the link"):
            link.send(Heartbeat())


async def test_a_refused_handshake_reaches_the_target_with_its_field() -> None:
    async def serve(call: LinkServerCall) -> None:
        await call.receive()
        raise HandshakeError("lookahead", "6 here, 8 there")

    async with linked(serve) as link:
        link.send(HELLO)
        for _ in range(2):
            with pytest.raises(HandshakeError, match="6 here, 8 there") as caught:
                await link.receive()
            assert caught.value.field == "lookahead"


async def test_a_draft_that_is_not_there_is_a_link_error_that_names_it() -> None:
    async with linked(listen_until_goodbye) as link:
        address = link.name
        await link.close()
    async with DraftClient(address) as client:
        dead = await client.open_link()
        with pytest.raises(LinkError, match=address):
            await dead.receive()
        with pytest.raises(LinkError, match=address):
            dead.send(Heartbeat())
        await dead.close()


async def test_a_target_that_vanishes_is_noticed_by_the_draft() -> None:
    noticed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    accepted = asyncio.Event()

    async def serve(call: LinkServerCall) -> None:
        accepted.set()
        try:
            await listen_until_goodbye(call)
            noticed.set_result("goodbye")
        except asyncio.CancelledError:
            noticed.set_result("cancelled")
            raise
        except LinkError:
            noticed.set_result("lost")
            raise

    async with linked(serve) as link:
        await accepted.wait()
        link._call.cancel()
        assert await noticed in {"cancelled", "lost", "goodbye"}
        with pytest.raises(LinkError):
            await link.receive()


async def test_frames_go_past_receive_and_straight_to_their_listener() -> None:
    async def serve(call: LinkServerCall) -> None:
        frames = LinkFrames(call)
        frames.start(frames.send, lambda _: None)
        await listen_until_goodbye(call)

    async with linked(serve) as link:
        heard: list[bytes] = []
        threads: set[int] = set()
        all_there = asyncio.Event()

        def on_payload(payload: bytes) -> None:
            heard.append(payload)
            threads.add(threading.get_ident())
            if len(heard) == 10:
                all_there.set()

        frames = LinkFrames(link)
        frames.start(on_payload, lambda _: None)

        def send_all() -> None:
            for each in range(10):
                frames.send(bytes([each]))

        await asyncio.to_thread(send_all)
        await all_there.wait()
        assert heard == [bytes([each]) for each in range(10)]
        assert threads == {threading.get_ident()}


async def test_a_full_outbox_is_a_link_error_and_never_a_wait() -> None:
    async with linked(listen_until_goodbye, max_outgoing=3) as link:
        for _ in range(3):
            link.send(Heartbeat())
        with pytest.raises(LinkError, match="3 messages wait"):
            link.send(Heartbeat())


async def test_a_peer_that_floods_is_cut_off() -> None:
    async def serve(call: LinkServerCall) -> None:
        for _ in range(MAX_INCOMING + 1):
            call.send(Heartbeat())
        await listen_until_goodbye(call)

    async with linked(serve) as link:
        assert link._reader is not None
        await asyncio.wait({link._reader})
        assert [await link.receive() for _ in range(MAX_INCOMING)] == [Heartbeat()] * MAX_INCOMING
        with pytest.raises(FrameError, match="nobody read"):
            await link.receive()


async def test_a_message_that_says_nothing_ends_the_link_with_a_frame_error() -> None:
    async with linked(listen_until_goodbye) as link:
        await link._call.write(speculation_pb2.SpeculateRequest())
        with pytest.raises(FrameError, match="says nothing"):
            await link.receive()


async def test_bytes_that_are_no_message_end_the_link_and_not_the_server() -> None:
    async with linked(listen_until_goodbye) as link:
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


async def test_waiting_for_a_message_can_be_given_up_without_loss() -> None:
    async def serve(call: LinkServerCall) -> None:
        await call.receive()
        call.send(Draining())
        await listen_until_goodbye(call)

    async with linked(serve) as link:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await link.receive()
        link.send(HELLO)
        assert await link.receive() == Draining()


async def test_a_listener_that_fails_ends_the_link_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def serve(call: LinkServerCall) -> None:
        call.send(b"x")
        await listen_until_goodbye(call)

    def fail(_payload: bytes) -> None:
        raise ZeroDivisionError("a bug")

    losses: list[Exception] = []
    async with linked(serve) as link:
        LinkFrames(link).start(fail, losses.append)
        with pytest.raises(LinkError, match="broke"):
            await link.receive()
    assert len(losses) == 1
    assert "link_failed" in caplog.text


async def test_sending_costs_no_wake_up_while_the_outbox_is_not_empty() -> None:
    async with linked(listen_until_goodbye) as link:
        wakes: list[object] = []
        link._call_in_loop = wakes.append  # type: ignore[method-assign, assignment]
        link.send(Heartbeat())
        link.send(Heartbeat())
        assert len(wakes) <= 1
        link._wake.set()


async def test_a_link_whose_loop_is_gone_refuses_messages() -> None:
    async with linked(listen_until_goodbye) as link:
        loop = asyncio.new_event_loop()
        loop.close()
        real, link._loop = link._loop, loop
        with pytest.raises(LinkError, match="no event loop"):
            await asyncio.to_thread(link._call_in_loop, lambda: None)
        link._loop = real


def test_messages_beyond_a_burst_are_taken_at_a_bounded_rate() -> None:
    allowance = Allowance(per_second=100.0, burst=10.0)
    assert [allowance.spend(1.0, 5.0) for _ in range(10)] == [0.0] * 10
    assert allowance.spend(1.0, 5.0) == pytest.approx(0.01)
    assert allowance.spend(5.0, 5.01) == pytest.approx(0.05)
    assert allowance.spend(10.0, 60.0) == 0.0, "a pause earns one burst and no more"
    assert allowance.spend(1.0, 60.0) == pytest.approx(0.01)


def test_an_honest_draft_with_many_sessions_is_not_held_up() -> None:
    allowance = Allowance(link_module.MESSAGES_PER_SECOND, link_module.BURST_MESSAGES)
    num_bytes = 64 * (HELLO.branches + 1) * row_width(HELLO.lookahead) * 4
    units = num_bytes / link_module.UNIT_BYTES
    assert {allowance.spend(units, round_number / 300) for round_number in range(10_000)} == {0.0}


async def test_a_peer_that_floods_is_read_at_a_bounded_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "MESSAGES_PER_SECOND", 0.1)
    monkeypatch.setattr(link_module, "BURST_MESSAGES", 10.0)

    async def serve(call: LinkServerCall) -> None:
        for _ in range(100):
            call.send(Heartbeat())
        await asyncio.Event().wait()

    async with linked(serve) as link:
        assert [await link.receive() for _ in range(11)] == [Heartbeat()] * 11
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await link.receive()


async def test_frames_that_come_too_early_are_bounded_in_bytes() -> None:
    async def serve(call: LinkServerCall) -> None:
        for _ in range(3):
            call.send(bytes(link_module.MAX_EARLY_BYTES // 2))
        await listen_until_goodbye(call)

    async with linked(serve) as link:
        with pytest.raises(FrameError, match="too early"):
            await link.receive()


async def test_a_peer_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "WRITE_SECONDS", 0.05)
    given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(call: LinkServerCall) -> None:
        for _ in range(64):
            call.send(bytes(1 << 20))
        try:
            await listen_until_goodbye(call)
        except LinkError as error:
            given_up.set_result(str(error))
            raise

    async with linked(serve) as link:
        client = DraftClient(link.name)
        raw: Any = client._channel
        call = raw.stream_stream("/ssd.v1.SpeculationService/Speculate")()
        await call.write(speculate_request(Heartbeat()).SerializeToString())
        async with asyncio.timeout(5.0):
            assert "took no message for 0.05 s" in await given_up
        call.cancel()
        await client.close()


async def test_bytes_of_a_draft_that_are_no_message_end_its_link_without_a_stack(
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


async def test_a_peer_that_goes_while_a_link_is_closed_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail() -> None:
        raise grpc.aio.InternalError("the call has ended")

    async with linked(listen_until_goodbye) as link:
        monkeypatch.setattr(link._call, "done_writing", fail)
        await link.close()
