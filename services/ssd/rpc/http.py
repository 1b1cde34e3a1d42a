"""Probes and metrics over plain HTTP: ``/livez``, ``/readyz``, ``/metrics``.

*Decision*: the standard library's WSGI server in daemon threads. *Because*: a probe needs an answer
while the event loop is busy, and three pages need no framework.
"""

import contextlib
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app

from ssd.errors import AddressError
from ssd.observability.log import get_logger
from ssd.rpc.listen import bindable, join_address, take_both_families

REQUEST_SECONDS = 10.0
"""A connection without traffic for this long is closed."""
MAX_CONNECTIONS = 64
"""Maximum number of connections, with a thread each. One more closes the oldest. A probe takes
milliseconds, so the oldest connection is a slow one."""
_BACKLOG = 128
"""Maximum number of connections that wait to be accepted. Clients retry others after a second."""
_POLL_SECONDS = 0.05
"""Maximum delay of ``close``."""

_log = get_logger(__name__)
IsLive = Callable[[], bool]
IsReady = Callable[[], tuple[bool, str]]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = _BACKLOG

    def __init__(self, host: str, port: int) -> None:
        self.address_family, host = bindable(host)
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        """Open sockets, oldest first."""
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread; close the oldest if there are too many."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its thread reads the end of the stream and closes the socket.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection. Called by its thread."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors except those of a slow or disconnected caller."""
        del request, client_address
        if not isinstance(sys.exception(), OSError):
            _log.exception("probe_failed")

    def server_bind(self) -> None:
        """Bind without a lookup of the host name, which can take seconds."""
        take_both_families(self.socket)
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name = str(host)
        self.server_port = int(port)
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Write no access log."""


class ProbeServer:
    """Serves the probes between ``start`` and ``close``. Its threads call the two callables."""

    def __init__(
        self,
        host: str,
        port: int,
        is_live: IsLive,
        is_ready: IsReady,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        self._host = host
        self._requested_port = port
        self._is_live = is_live
        self._is_ready = is_ready
        self._metrics = make_wsgi_app(metrics)
        self._server: _Server | None = None
        self.port = 0
        """The port in use, after ``start``."""

    def start(self) -> None:
        """Bind and serve in a daemon thread.

        Raises:
            AddressError: the port is in use, or the machine does not have the address.
        """
        try:
            server = _Server(self._host, self._requested_port)
        except OSError as error:
            raise AddressError(
                f"cannot listen on {join_address(self._host, self._requested_port)} for HTTP: "
                f"{error.strerror}; choose another --http-port, or 0 for any"
            ) from error
        server.set_app(self._serve)
        self.port = server.server_port
        self._server = server
        threading.Thread(
            target=server.serve_forever, args=(_POLL_SECONDS,), name="probes", daemon=True
        ).start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _serve(self, environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        match environ.get("PATH_INFO", ""):
            case "/metrics":
                page: Iterable[bytes] = self._metrics(environ, respond)
                return page
            case "/livez":
                is_ok = self._is_live()
                text = "live" if is_ok else "not live"
            case "/readyz":
                is_ok, text = self._is_ready()
            case _:
                return _text(respond, "404 Not Found", "the paths are /livez, /readyz and /metrics")
        return _text(respond, "200 OK" if is_ok else "503 Service Unavailable", text)


def _text(respond: StartResponse, status: str, text: str) -> Iterable[bytes]:
    body = f"{text}\n".encode()
    headers = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
    ]
    respond(status, headers)
    return [body]
