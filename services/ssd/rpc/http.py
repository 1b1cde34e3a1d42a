"""Probes and metrics over plain HTTP: ``/livez``, ``/readyz``, ``/metrics``.

Decision: the standard library's WSGI server in daemon threads. Because: a probe must answer while
the event loop is busy, and three pages need no framework.
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

from ssd import telemetry
from ssd.errors import AddressError
from ssd.rpc.listen import bindable, take_both_families
from ssd.rpc.server import join_address

REQUEST_SECONDS = 10.0
"""A connection on which nothing moves for this long is dropped."""
MAX_CONNECTIONS = 64
"""Connections at a time, with a thread each. One more closes the oldest: a probe takes
milliseconds, so the oldest is a slow one, and slow ones never keep a probe out."""
_BACKLOG = 128
"""Connections that wait to be accepted; clients try further ones again a second later."""
_POLL_SECONDS = 0.05
"""How long ``close`` takes at most to be noticed."""

_log = telemetry.get_logger(__name__)
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
        """Sockets that are served, oldest first."""
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; close the oldest if there are too many."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its thread finds the end of the stream, and closes it.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection. The thread that serves it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that is slow or has gone is no event; anything else is our bug."""
        del request, client_address
        if not isinstance(sys.exception(), OSError):
            _log.exception("probe_failed")

    def server_bind(self) -> None:
        """Bind without asking the name service who we are, which can take seconds."""
        take_both_families(self.socket)
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name = str(host)
        self.server_port = int(port)
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Keep no access log."""


class ProbeServer:
    """Serves the probes between ``start`` and ``close``; the callables run in its threads."""

    def __init__(
        self,
        host: str,
        port: int,
        is_live: IsLive,
        is_ready: IsReady,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        self._host = host
        self._asked_port = port
        self._is_live = is_live
        self._is_ready = is_ready
        self._metrics = make_wsgi_app(metrics)
        self._server: _Server | None = None
        self.port = 0
        """The port in use, after ``start``."""

    def start(self) -> None:
        """Bind and serve in a daemon thread.

        Raises:
            AddressError: the port is in use, or the address is not ours.
        """
        try:
            server = _Server(self._host, self._asked_port)
        except OSError as error:
            raise AddressError(
                f"cannot listen on {join_address(self._host, self._asked_port)} for HTTP: "
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
                is_live = self._is_live()
                return _say(respond, is_fine=is_live, text="live" if is_live else "not live")
            case "/readyz":
                is_ready, reason = self._is_ready()
                return _say(respond, is_fine=is_ready, text=reason)
        return _text(respond, "404 Not Found", "there are /livez, /readyz and /metrics")


def _say(respond: StartResponse, *, is_fine: bool, text: str) -> Iterable[bytes]:
    return _text(respond, "200 OK" if is_fine else "503 Service Unavailable", text)


def _text(respond: StartResponse, status: str, text: str) -> Iterable[bytes]:
    body = f"{text}\n".encode()
    headers = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
    ]
    respond(status, headers)
    return [body]
