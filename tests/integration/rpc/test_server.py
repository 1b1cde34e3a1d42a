import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from tests.served import serving
from tests.unit.ssd.rpc.test_http import has_ipv6

from ssd.errors import (
    AddressError,
    FieldError,
    InternalError,
    NotReadyError,
    OverloadedError,
    SSDError,
)
from ssd.rpc import server as rpc_server
from ssd.rpc.call_guard import ServerLimits, current_request_id
from ssd.rpc.client import TargetClient
from ssd.rpc.listen import join_address
from ssd.rpc.server import RpcServer
from ssd.v1 import generate_pb2, generate_pb2_grpc


class Servicer(generate_pb2_grpc.GenerateServiceServicer):
    """Returns a response, or raises ``error``."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.request_ids: list[str] = []

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.request_ids.append(current_request_id())
        if self.error is not None:
            raise self.error
        return generate_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield generate_pb2.GenerateResponse(text="a")
        if self.error is not None:
            raise self.error


@pytest.fixture
async def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
async def server(servicer: Servicer) -> AsyncIterator[RpcServer]:
    async with serving(servicer, reflection=True) as running:
        yield running


@pytest.fixture
async def client(server: RpcServer) -> AsyncIterator[TargetClient]:
    async with TargetClient(f"127.0.0.1:{server.port}") as running:
        yield running


async def test_the_client_raises_the_error_of_the_server(
    servicer: Servicer, client: TargetClient
) -> None:
    servicer.error = FieldError("text", "is empty")
    with pytest.raises(FieldError, match="text: is empty"):
        await client.tokenize("x")
    servicer.error = OverloadedError("full", 2.5)
    with pytest.raises(OverloadedError) as caught:
        await client.tokenize("x")
    assert caught.value.retry_after_seconds == 2.5
    servicer.error = None
    assert await client.tokenize("xyz") == (3,)


async def test_a_cut_error_keeps_its_class(servicer: Servicer, client: TargetClient) -> None:
    servicer.error = FieldError("text", "😀" * 100_000)
    with pytest.raises(FieldError) as caught:
        await client.tokenize("x")
    assert caught.value.field == "text"
    assert set(caught.value.description) == {"😀"}


async def test_an_internal_error_logs_its_stack_and_returns_only_the_request_id(
    servicer: Servicer, client: TargetClient, caplog: pytest.LogCaptureFixture
) -> None:
    servicer.error = ZeroDivisionError("secret text")
    with pytest.raises(InternalError) as caught:
        await client.tokenize("x")
    assert servicer.request_ids[0] in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret text" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_servicer_that_cancels_its_own_work_ends_the_call_with_internal(
    servicer: Servicer, client: TargetClient, caplog: pytest.LogCaptureFixture
) -> None:
    servicer.error = asyncio.CancelledError()
    async with asyncio.timeout(60):
        with pytest.raises(InternalError, match=r"internal error; see the server's log"):
            await client.tokenize("x")
        with pytest.raises(InternalError, match=r"internal error; see the server's log"):
            _ = [chunk async for chunk in client.generate("x")]
    assert "call_failed" in caplog.text
    assert "Traceback" in caplog.text


async def test_an_error_during_a_stream_follows_the_sent_messages(
    servicer: Servicer, client: TargetClient
) -> None:
    servicer.error = OverloadedError("late")
    texts = []
    with pytest.raises(OverloadedError, match="late"):  # noqa: PT012 - the stream is the point
        async for chunk in client.generate("x"):
            texts.append(chunk.text)
    assert texts == ["a"]


async def test_a_valid_request_id_of_the_caller_is_used(
    servicer: Servicer, server: RpcServer
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = generate_pb2_grpc.GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        for given in ("r-1", "x" * 129):
            await stub.Tokenize(generate_pb2.TokenizeRequest(), metadata=(("x-request-id", given),))
    assert servicer.request_ids[0] == "r-1"
    assert 0 < len(servicer.request_ids[1]) < 129


async def test_a_port_in_use_is_an_error_that_names_the_address(server: RpcServer) -> None:
    with pytest.raises(AddressError, match=f"127.0.0.1:{server.port}"):
        await RpcServer("127.0.0.1", server.port).start()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AddressError, match=str(port)):
            await RpcServer("127.0.0.1", port).start()


async def test_health_follows_set_serving(server: RpcServer, client: TargetClient) -> None:
    assert not await client._is_serving()
    server.set_serving(True)
    await client.wait_ready(5.0)
    server.set_serving(False)
    while await client._is_serving():
        pass


async def test_stop_is_idempotent_and_frees_the_port(server: RpcServer) -> None:
    await server.stop(0)
    await server.stop(0)
    again = RpcServer("127.0.0.1", server.port)
    await again.start()
    assert again.port == server.port
    await again.stop(0)


def test_an_ipv6_host_gets_brackets() -> None:
    assert join_address("::1", 5) == "[::1]:5"
    assert join_address("[::1]", 5) == "[::1]:5"
    assert join_address("localhost", 5) == "localhost:5"


async def first_error(client: TargetClient) -> SSDError:
    while True:
        try:
            await client.tokenize("x")
        except SSDError as error:
            return error


async def test_a_call_during_a_stop_is_a_not_ready_error() -> None:
    # gRPC cancels calls that have not started: in most of ten rounds.
    for _ in range(10):
        async with (
            serving(Servicer()) as server,
            TargetClient(f"127.0.0.1:{server.port}") as client,
        ):
            tasks = [asyncio.create_task(first_error(client)) for _ in range(8)]
            for _ in range(20):
                await client.tokenize("x")
            await server.stop(0.5)
            errors = await asyncio.gather(*tasks)
        assert {type(error) for error in errors} == {NotReadyError}, errors


async def test_a_connection_without_a_handshake_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "grpc.server_handshake_timeout_ms"
    assert name in dict(rpc_server.OPTIONS)
    options = dict(rpc_server.OPTIONS) | {name: 100}
    monkeypatch.setattr(rpc_server, "OPTIONS", tuple(options.items()))
    async with serving() as server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while await reader.read(1 << 16):
            pass
        writer.close()


async def test_connections_over_the_limit_are_closed_and_the_others_are_served(
    servicer: Servicer,
) -> None:
    async with serving(servicer, limits=ServerLimits(connections=2)) as server:
        clients = [TargetClient(f"127.0.0.1:{server.port}", ready_seconds=0) for _ in range(3)]
        for client in clients[:2]:
            assert await client.tokenize("x") == (1,)
        with pytest.raises(NotReadyError):
            await clients[2].tokenize("x")
        assert await clients[0].tokenize("x") == (1,)
        for client in clients:
            await client.close()


@has_ipv6
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_grpc_listens_on_both_address_families(host: str) -> None:
    server = RpcServer(host, 0)
    await server.start()
    try:
        for each in ("127.0.0.1", "::1"):
            socket.create_connection((each, server.port), 5).close()
    finally:
        await server.stop()
