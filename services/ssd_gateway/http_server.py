"""uvicorn on a socket of ours, with limits on connections."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssd.errors import AddressError
from ssd.rpc.listen import bindable, take_both_families
from ssd.rpc.server import join_address
from ssd_gateway.settings import GatewaySettings

FIRST_REQUEST_SECONDS = 30.0
"""A connection without a complete first request line and headers for this long is closed."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pause after which usual clients drop idle connections."""
BACKLOG = 1024


def bind(settings: GatewaySettings) -> socket.socket:
    """Return a bound socket, which listens later.

    Raises:
        AddressError: the port is in use, or the machine does not have the address.
    """
    family, host = bindable(settings.host)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Ends connections whose client acknowledges nothing, also after they are closed.
        stall_ms = round(settings.stream_stall_seconds * 1000)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        take_both_families(listening)
        listening.bind((host, settings.port))
    except OSError as error:
        listening.close()
        raise AddressError(
            f"cannot listen on {join_address(settings.host, settings.port)} for HTTP: "
            f"{error.strerror}; choose another --port, or 0 for any"
        ) from error
    return listening


class HttpServer(uvicorn.Server):
    """Serves an application until ``should_exit``; then finishes the running requests."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        config = uvicorn.Config(
            app,
            http=_protocol(settings.max_connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the process."""
        yield


def _protocol(max_connections: int) -> type[H11Protocol]:
    class Protocol(H11Protocol):
        """Closes connections above the limit, and those that send no request."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
                return
            self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_without_request)

        def _close_without_request(self) -> None:
            begun: object | None = self.cycle
            if begun is None:
                self.transport.abort()

    return Protocol
