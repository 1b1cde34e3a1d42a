"""uvicorn on a socket of ours, with limits on connections."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Generator
from itertools import islice
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ssd.errors import AddressError
from ssd.observability.log import get_logger
from ssd.rpc.listen import bindable, join_address, take_both_families
from ssd_gateway.settings import GatewaySettings

REQUEST_SECONDS = 30.0
"""Maximum time from the first byte of a request, or the connection, to the end of the headers, and
from a response to the end of its request."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pause after which usual clients drop idle connections."""
BACKLOG = 1024
EXAMINED_CONNECTIONS = 16
"""Connections of which one may be closed for a new one."""
REST_SECONDS = 2.0
"""Time after a response in which a connection with an incomplete request is not closed for a new
one. Clients read the response after they have sent the request."""
UNSENT_BYTES = 64 * 1024
"""Bytes of a connection that the kernel has not sent yet, before a response waits."""
END_SECONDS = 2
"""After the drain: time for the errors of the requests that it ended. Then they are cancelled."""
_log = get_logger(__name__)


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
        # Else the kernel takes megabytes, and reports only every megabyte that a client reads.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
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
    """Serves an application until ``end``."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        limits = {
            "max_connections": settings.max_connections,
            "stall_seconds": settings.stream_stall_seconds,
            "waiting": {},
        }
        config = uvicorn.Config(
            app,
            http=type("Connection", (_Connection,), limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        super().__init__(config)

    def end(self, seconds: float) -> None:
        """Accept no more connections; open responses have these seconds to end."""
        self.config.timeout_graceful_shutdown = math.ceil(seconds) + END_SECONDS
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the process."""
        yield


class _Deadline:
    """Calls a function unless it is stopped in time. Asyncio loop."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self._seconds = seconds
        self._act = act
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start; no effect while it runs."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._act)

    def stop(self) -> None:
        """Stop; no effect if it does not run."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Connection(H11Protocol):
    """Closes connections above the limit, and those whose client sends or reads too slowly."""

    max_connections: ClassVar[int]
    stall_seconds: ClassVar[float]
    waiting: ClassVar[dict["_Connection", None]]
    """Connections without a request, the one that has waited longest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._request_deadline = _Deadline(REQUEST_SECONDS, transport.abort)
        self._read_deadline = _Deadline(self.stall_seconds, self._abort_stalled)
        if len(self.connections) > self.max_connections:
            # Else clients that keep connections exclude all others, also the kubelet's probes.
            # All of them would take milliseconds of the other clients' streams.
            oldest = islice(self.waiting, EXAMINED_CONNECTIONS)
            closed = next((each for each in oldest if each.is_idle), self)
            self.waiting.pop(closed, None)
            # ``connection_lost`` comes later, and the next connection counts before it.
            self.connections.discard(closed)
            closed.transport.abort()
            if closed is self:
                return
        self.waiting[self] = None
        self._request_deadline.start()

    def on_response_complete(self) -> None:
        self.waiting[self] = None
        super().on_response_complete()
        if self.transport.is_closing() or not self.is_waiting:
            # It is over, or a pipelined request has begun.
            self.waiting.pop(self, None)
        elif self.cycle.more_body:
            # The response came before the end of the body, which may never be sent.
            self._answered_at = asyncio.get_running_loop().time()
            self._request_deadline.start()

    @property
    def is_idle(self) -> bool:
        """Whether it waits, has sent its last response, and receives no rest of a refused body.

        After ``REST_SECONDS``, a missing rest no longer counts. Otherwise clients that never send
        the rest would exclude all others.
        """
        if not self.is_waiting or self.transport.get_write_buffer_size():
            return False
        current: RequestResponseCycle | None = self.cycle
        if current is None or not current.more_body:
            return True
        return asyncio.get_running_loop().time() - self._answered_at > REST_SECONDS

    @property
    def is_waiting(self) -> bool:
        """Whether no request is in progress."""
        current: RequestResponseCycle | None = self.cycle
        return current is None or current.response_complete

    def data_received(self, data: bytes) -> None:
        # Any byte stops uvicorn's own deadline of an idle connection.
        super().data_received(data)
        if self.is_waiting:
            self._request_deadline.start()
        else:
            self.waiting.pop(self, None)
            self._request_deadline.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._read_deadline.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_deadline.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.waiting.pop(self, None)
        self._request_deadline.stop()
        self._read_deadline.stop()

    def _abort_stalled(self) -> None:
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if self._unread < before:
            # It reads, but a large response is not over.
            self._read_deadline.stop()
            self._read_deadline.start()
            return
        _log.info("client_stalled", seconds=self.stall_seconds)
        # The request receives a disconnect, as if the client had left.
        self.transport.abort()
