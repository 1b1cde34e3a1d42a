"""Reading the metrics page of another process."""

import asyncio

import pytest

from ssd.observability.scrape import scrape


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nssd_rounds", "IncompleteRead"),
        (b"no HTTP\r\n\r\n", "no HTTP"),
    ],
)
async def test_a_page_that_ends_early_is_an_error_of_the_connection(
    answer: bytes, cause: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(OSError, match=rf"http://{host}:{port}/metrics: .*{cause}"):
            await scrape(f"{host}:{port}")


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    # The default opener reads the variables once.
    monkeypatch.setattr("urllib.request._opener", None)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\nssd_rounds 3\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        assert await scrape(f"{host}:{port}") == {"ssd_rounds": 3.0}
