"""Connections to the API: limits, slow clients and broken HTTP."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.gateway import (
    JSON_HEAD,
    Front,
    ScriptedTarget,
    endless,
    fronting,
    get,
    post,
    until_running,
)

from ssd.rpc.codec import GenerateCall
from ssd.types import GenerationChunk
from ssd_gateway import http_server
from ssd_gateway.settings import GatewaySettings

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 300 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 200_000,
        JSON_HEAD + b"content-length: 99999999999999999999\r\n\r\n{}",
        JSON_HEAD + b"content-length: -1\r\n\r\n{}",
        JSON_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["zeros", "header", "large", "negative", "chunk"],
)
async def test_broken_http_is_refused_and_the_next_connection_is_served(
    sent: bytes, front: Front
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(12), 10)
    assert answer in (b"HTTP/1.1 400", b"HTTP/1.1 413")
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert (await get(front, "/livez"))[0] == 200


async def test_a_connection_over_the_limit_replaces_the_one_that_has_waited_longest() -> None:
    async with fronting(ScriptedTarget(), max_connections=2) as front:
        first = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        second = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        for reader, writer in (first, second, first):
            writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await asyncio.wait_for(reader.readuntil(b"live\n"), 10)
        assert (await get(front, "/livez"))[0] == 200
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(second[0].read(), 10) == b""
        first[1].write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(first[0].readuntil(b"live\n"), 10)
        for _, each in (first, second):
            each.close()


async def test_a_connection_over_the_limit_is_closed_if_all_have_requests() -> None:
    async with fronting(ScriptedTarget(endless), max_connections=2) as front:
        body = b'{"model":"demo","prompt":"x","stream":true}'
        opened = [await post(front, body) for _ in range(2)]
        for reader, _ in opened:
            await asyncio.wait_for(reader.readuntil(b"data"), 10)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, each in (*opened, (reader, writer)):
            each.close()


@pytest.mark.parametrize("head", [b"", b"content-length: 9\r\n"], ids=["request", "body"])
async def test_a_connection_is_closed_if_what_follows_a_response_does_not_end(
    monkeypatch: pytest.MonkeyPatch, head: bytes, front: Front
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n")
    await asyncio.wait_for(reader.readuntil(b"live\n"), 10)
    writer.write(b"G")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


@contextlib.asynccontextmanager
async def serving(app: Any, **values: Any) -> AsyncGenerator[Any, None]:
    """An application on a port; gives its address."""
    settings = GatewaySettings(targets=("127.0.0.1:1",), host="127.0.0.1", port=0, **values)
    listening = http_server.bind(settings)
    server = http_server.HttpServer(app, settings)
    task = asyncio.create_task(server.serve([listening]))
    listening.listen()
    yield listening.getsockname()
    server.end(0.0)
    await task


def client_of(address: Any) -> socket.socket:
    """A client with a small buffer, after it has sent a request."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.connect(address)
    client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return client


async def test_the_kernel_takes_little_of_a_response_that_is_not_read() -> None:
    sent, ended = 0, asyncio.Event()

    async def endless(_scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        leaving = asyncio.create_task(receive())
        while not leaving.done():
            await send({"type": "http.response.body", "body": bytes(50_000), "more_body": True})
            sent += 50_000
            await asyncio.sleep(0)
        ended.set()

    async with serving(endless, stream_stall_seconds=1.0) as address:
        with client_of(address):
            await asyncio.wait_for(ended.wait(), 20)
    assert sent < 1_000_000


async def test_a_client_that_reads_a_large_response_slowly_receives_all_of_it() -> None:
    async def large(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(1_500_000)})

    async with serving(large, stream_stall_seconds=1.0) as address:
        loop, received = asyncio.get_running_loop(), 0
        with client_of(address) as client:
            client.setblocking(False)  # noqa: FBT003 - the value
            while part := await loop.sock_recv(client, 100_000):
                received += len(part)
                await asyncio.sleep(0.2)
                if received > 1_500_000:
                    break
    assert received > 1_500_000


async def test_requests_without_the_end_of_their_body_do_not_exclude_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "REST_SECONDS", 0.0)
    request = b"POST /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\n\r\n{"
    async with fronting(ScriptedTarget(), max_connections=3) as front:
        opened = [await asyncio.open_connection("127.0.0.1", front.gateway.port) for _ in range(3)]
        for reader, writer in opened:
            writer.write(request)
            await asyncio.wait_for(reader.readuntil(b"405"), 10)
        assert (await get(front, "/livez"))[0] == 200
        for _, writer in opened:
            writer.close()


async def test_a_connection_without_the_end_of_its_body_is_closed(
    monkeypatch: pytest.MonkeyPatch, front: Front
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
    writer.write(b"POST /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"405"), 10)
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 5)
    writer.close()


async def test_a_connection_that_still_sends_its_refused_request_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "REST_SECONDS", 60.0)
    stream = b'{"model":"demo","prompt":"x","stream":true}'
    async with fronting(ScriptedTarget(endless), max_connections=3) as front:
        first = await post(front, stream)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        writer.write(b"POST /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90000\r\n\r\n")
        # After it, the gateway has refused the request.
        assert (await get(front, "/livez"))[0] == 200
        second = await post(front, stream)
        for streaming, _ in (first, second):
            await asyncio.wait_for(streaming.readuntil(b"data"), 10)
        late = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(late[0].read(), 10) == b""
        writer.write(bytes(90_000))
        await asyncio.wait_for(reader.readuntil(b"405"), 10)
        for _, each in (first, second, late, (reader, writer)):
            each.close()


async def test_a_client_that_reads_nothing_is_disconnected_and_its_request_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    ended = asyncio.Event()

    async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        try:
            while True:
                yield GenerationChunk(token_ids=(1,), text="a" * 200_000)
        finally:
            ended.set()

    async with fronting(ScriptedTarget(endless), stream_stall_seconds=0.2) as front:
        _, writer = await post(front, b'{"model":"demo","prompt":"x","stream":true}')
        await asyncio.wait_for(ended.wait(), 20)
        await until_running(front, 0)
        writer.close()
    assert [each.levelname for each in caplog.records if each.levelname == "ERROR"] == []
    assert "client_stalled" in caplog.text
