"""Resources that a server keeps for a call: memory, concurrency, pending writes."""

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.errors import (
    CancelledError,
    DeadlineError,
    FieldError,
    InternalError,
    OverloadedError,
    RequestError,
)
from ssd.rpc.call_guard import ServerLimits
from ssd.rpc.server import RpcServer
from ssd.rpc.status import from_rpc_error

METHOD = "/test.Service/Method"
WINDOW = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
"""Options of a client that receives nothing until it reads."""
LONG = b"x" * 1_000_000
ANSWER_SECONDS = 10.0
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
Behaviour = Callable[[Any, Any], Awaitable[Any]]


class Payload:
    """A request whose release can be observed."""

    alive: ClassVar["weakref.WeakSet[Payload]"] = weakref.WeakSet()

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.alive.add(self)


@asynccontextmanager
async def serving(behaviour: Behaviour, **options: Any) -> AsyncIterator[RpcServer]:
    """A server with one streaming method."""
    handler = grpc.unary_stream_rpc_method_handler(behaviour, request_deserializer=Payload)
    generic = grpc.method_handlers_generic_handler("test.Service", {"Method": handler})
    server = RpcServer("127.0.0.1", 0, **options)
    server.add("test.Service", lambda each: each.add_generic_rpc_handlers((generic,)))
    await server.start()
    server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def channel_to(server: RpcServer, *options: tuple[str, int]) -> AsyncIterator[Any]:
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


async def fail(_request: Payload, _context: object) -> None:
    raise AssertionError("was called")


async def failed_call(server: RpcServer, message: bytes = b"x") -> Exception:
    """Return the error of a call, as the clients raise it."""
    async with channel_to(server) as channel:
        call = channel.unary_stream(METHOD)(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return from_rpc_error(caught.value, "there")


async def is_healthy(server: RpcServer) -> bool:
    make: Any = health_pb2_grpc.HealthStub
    async with channel_to(server) as channel:
        answer = await make(channel).Check(health_pb2.HealthCheckRequest())
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def without_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def all_freed() -> None:
    """Wait for the end of the server's task, which can be after the answer of its call."""
    async with asyncio.timeout(10):
        while Payload.alive:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("without_collector")
async def test_a_refused_request_is_freed_without_a_garbage_collection() -> None:
    async def refuse(request: Payload, _context: object) -> None:
        await asyncio.sleep(0)
        raise FieldError("text", f"has {len(request.message)} bytes")

    async with serving(refuse) as server:
        for _ in range(3):
            assert isinstance(await failed_call(server), FieldError)
    await all_freed()


@pytest.mark.usefixtures("without_collector")
async def test_a_request_aborted_by_another_servicer_is_freed() -> None:
    async def abort(request: Payload, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, f"{len(request.message)}")

    async with serving(abort) as server:
        assert type(await failed_call(server)).__name__ == "UnknownModelError"
    await all_freed()


def new_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records without those of grpc's poller about the closed loop of another test."""
    return [
        record
        for record in caplog.records
        if record.exc_info is None or str(record.exc_info[1]) != "Event loop is closed"
    ]


async def test_concurrent_calls_are_limited_per_method() -> None:
    leave = asyncio.Event()
    num_inside = 0

    async def hold(_request: Payload, context: Any) -> None:
        nonlocal num_inside
        num_inside += 1
        await context.write(b"inside")
        await leave.wait()

    failures: list[tuple[str, type[Exception]]] = []
    limits = ServerLimits(calls=2)
    async with (
        serving(
            hold, limits=limits, on_failure=lambda name, error: failures.append((name, type(error)))
        ) as server,
        channel_to(server) as channel,
    ):
        calls = [channel.unary_stream(METHOD)(b"x") for _ in range(2)]
        for call in calls:
            assert await call.read() == b"inside"
        refusal = await failed_call(server)
        assert isinstance(refusal, OverloadedError)
        assert "2 calls of /test.Service/Method" in str(refusal)
        assert await is_healthy(server)
        leave.set()
        for call in calls:
            assert not await call.read()
        last = channel.unary_stream(METHOD)(b"x")
        assert [await last.read(), await last.read()] == [b"inside", EOF]
    assert num_inside == 3
    assert failures == [(METHOD, OverloadedError)]


async def test_an_oversize_message_does_not_reach_the_servicer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(fail, limits=ServerLimits(message_bytes=1000)) as server:
        refusal = await failed_call(server, b"x" * 1001)
        assert await is_healthy(server)
    assert isinstance(refusal, RequestError)
    assert "1,001 bytes" in str(refusal)
    assert "over 1,000 bytes" in str(refusal)
    assert new_records(caplog) == []


async def test_an_undecodable_request_stream_is_an_invalid_argument(
    caplog: pytest.LogCaptureFixture,
) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with serving(fail, reflection=True) as server, channel_to(server) as channel:
        call = channel.stream_stream(method)()
        await call.write(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be decoded") as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert new_records(caplog) == []


async def test_a_call_without_a_request_times_out_and_frees_its_place() -> None:
    limits = ServerLimits(calls=1, request_seconds=0.05)
    async with serving(fail, limits=limits) as server, channel_to(server) as channel:
        call = channel.stream_stream(METHOD)()
        with pytest.raises(grpc.aio.AioRpcError, match=r"did not arrive within 0\.05 s") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert isinstance(await failed_call(server), InternalError)


class InTime:
    """A servicer that gives up if its message is not read."""

    def __init__(self) -> None:
        self.gave_up, self.over = asyncio.Event(), asyncio.Event()

    async def __call__(self, _request: Payload, context: Any) -> None:
        context.add_done_callback(lambda _context: self.over.set())
        try:
            async with asyncio.timeout(0.05):
                await context.write(LONG)
        except TimeoutError as error:
            self.gave_up.set()
            raise DeadlineError("the stream was not read") from error


async def test_a_stalled_reader_receives_its_status_when_it_resumes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = InTime()
    async with serving(write) as server, channel_to(server, *WINDOW) as channel:
        call = channel.unary_stream(METHOD)(b"x")
        await write.gave_up.wait()
        assert await is_healthy(server)
        assert await call.read() == LONG
        with pytest.raises(grpc.aio.AioRpcError, match="the stream was not read") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert new_records(caplog) == []


async def test_a_stalled_reader_keeps_its_place_until_it_resumes() -> None:
    write = InTime()
    async with (
        serving(write, limits=ServerLimits(calls=1)) as server,
        channel_to(server, *WINDOW) as channel,
    ):
        call = channel.unary_stream(METHOD)(b"x")
        await write.gave_up.wait()
        assert isinstance(await failed_call(server), OverloadedError)
        assert await call.read() == LONG
        with pytest.raises(grpc.aio.AioRpcError, match="the stream was not read"):
            await call.read()
        write.gave_up.clear()
        assert await channel.unary_stream(METHOD)(b"x").read() == LONG


async def test_a_reader_that_never_resumes_loses_its_place() -> None:
    write = InTime()
    async with (
        serving(write, limits=ServerLimits(calls=1, unread_seconds=0.05)) as server,
        channel_to(server, *WINDOW) as channel,
        channel_to(server) as another,
    ):
        call = channel.unary_stream(METHOD)(b"x")
        await write.gave_up.wait()
        async with asyncio.timeout(ANSWER_SECONDS):
            while (found := await first_message(another)) is None:
                pass
        assert (found, await call.read()) == (LONG, LONG)
        with pytest.raises(grpc.aio.AioRpcError, match="the stream was not read"):
            await call.read()


async def first_message(channel: Any) -> object:
    """Return the first message of a call, None if the call is refused."""
    try:
        return await channel.unary_stream(METHOD)(b"x").read()
    except grpc.aio.AioRpcError:
        return None


async def test_a_stalled_reader_receives_the_end_of_a_call_that_stopped_writing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gave_up = asyncio.Event()

    async def write_or_end(_request: Payload, context: Any) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await context.write(LONG)
        gave_up.set()

    async with serving(write_or_end) as server, channel_to(server, *WINDOW) as channel:
        call = channel.unary_stream(METHOD)(b"x", timeout=ANSWER_SECONDS)
        await gave_up.wait()
        assert await is_healthy(server)
        assert await call.read() == LONG
        assert await call.read() is EOF
        assert await call.code() is grpc.StatusCode.OK
    assert new_records(caplog) == []


async def test_a_stalled_reader_that_disconnects_logs_no_stack_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = InTime()
    async with serving(write) as server:
        async with channel_to(server, *WINDOW) as channel:
            call = channel.unary_stream(METHOD)(b"x")
            await write.gave_up.wait()
            call.cancel()
            await write.over.wait()
        assert await is_healthy(server)
    assert new_records(caplog) == []


@pytest.mark.parametrize(
    ("seconds", "kind"), [(0.2, DeadlineError), (None, CancelledError)], ids=["deadline", "left"]
)
async def test_a_deadline_and_a_cancellation_are_different_errors(
    seconds: float | None, kind: type[Exception]
) -> None:
    failures: list[type[Exception]] = []
    over = asyncio.Event()

    async def hold(_request: Payload, context: Any) -> None:
        context.add_done_callback(lambda _context: over.set())
        await context.write(b"inside")
        await asyncio.Event().wait()

    async with (
        serving(hold, on_failure=lambda _method, error: failures.append(type(error))) as server,
        channel_to(server) as channel,
    ):
        call = channel.unary_stream(METHOD)(b"x", timeout=seconds)
        assert await call.read() == b"inside"
        if seconds is None:
            call.cancel()
        await over.wait()
    assert failures == [kind]
