"""What every request passes: its id, its key, the limit of requests, metrics."""

import asyncio
import contextlib
import re
import secrets
from collections import Counter
from collections.abc import Iterator

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd.errors import NotAllowedError, NotReadyError, OverloadedError, SSDError
from ssd.observability import log
from ssd.settings import is_loopback
from ssd_gateway.api import CLIENT_KEY, STATUS_KEY
from ssd_gateway.api_keys import ApiKeys
from ssd_gateway.deadlines import Deadlines
from ssd_gateway.metrics import REQUESTS_TOTAL, RUNNING_REQUESTS
from ssd_gateway.problems import problem_response
from ssd_gateway.settings import GatewaySettings

API_PREFIX = "/v1/"
_KNOWN_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models"})
_SHARE_OF_OTHERS = 8
"""The part of ``max_requests`` that is kept for other clients than the one with the most: 1/8."""
_PORT = re.compile(":[0-9]*$")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE_PARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_STATE = re.compile(r"[\x20-\x7e]{1,512}")
_log = log.get_logger(__name__)


class Gate:
    """ASGI middleware. Paths outside ``/v1`` need no key and are not counted. Asyncio loop."""

    def __init__(
        self, app: ASGIApp, settings: GatewaySettings, keys: ApiKeys, deadlines: Deadlines
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._deadlines = deadlines
        self._is_local = (
            is_loopback(settings.host)
            and not settings.api_keys_file
            and not settings.allow_insecure
        )
        self._num_requests = 0
        self._num_requests_of: Counter[str] = Counter()
        """Admitted requests in progress, by client."""
        self.is_idle = asyncio.Event()
        """Set while no request runs."""
        self.is_idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else secrets.token_hex(8)
        log.request_id.set(request_id)
        log.trace_headers.set(_trace_headers(headers))
        out = _Sender(send, request_id)
        path: str = scope["path"]
        host = headers.get("host", "localhost")
        if self._is_local and not is_loopback(_PORT.sub("", host).lower()):
            # For a browser, a page whose name resolves to the loopback has the same origin.
            refusal = NotAllowedError(
                f"the header Host is {host[:64]!r}, must be localhost, 127.0.0.1 or [::1], because "
                "requests need no key; set api_keys_file, or allow_insecure for a proxy"
            )
            await problem_response(refusal, request_id)(scope, receive, out)
            return
        if not path.startswith(API_PREFIX):
            await self._app(scope, receive, out)
            return
        if self._deadlines.draining.is_set():
            stops = NotReadyError("the gateway stops and accepts no new requests")
            # A client that keeps its connection would not reach another gateway.
            await problem_response(stops, request_id, closes=True)(scope, receive, out)
            _count(scope, out, "refused")
            return
        self._num_requests += 1
        self.is_idle.clear()
        RUNNING_REQUESTS.set(self._num_requests)
        event = "refused"
        try:
            try:
                self._admit(scope, headers.get("authorization"))
            except SSDError as error:
                await problem_response(error, request_id)(scope, receive, out)
                return
            event = "request"
            with self._counted(scope[CLIENT_KEY]):
                await self._app(scope, receive, out)
        finally:
            self._num_requests -= 1
            RUNNING_REQUESTS.set(self._num_requests)
            if not self._num_requests:
                self.is_idle.set()
            _count(scope, out, event)

    def _admit(self, scope: Scope, authorization: str | None) -> None:
        """Note who sends a request.

        A request counts from its headers on, so one client could keep all others out at no cost.

        Raises:
            AccessError: its key is missing or wrong.
            OverloadedError: all clients together, or this one, have too many requests.
        """
        scope[CLIENT_KEY], _ = scope.get("client") or ("", 0)
        if name := self._keys.check(authorization):
            scope[CLIENT_KEY] = f"key {name}"
        most = self._settings.max_requests
        if self._num_requests > most:
            raise OverloadedError(
                f"{most} requests are in progress, the maximum of this gateway (max_requests)"
            )
        of_one = most - most // _SHARE_OF_OTHERS
        if self._num_requests_of[scope[CLIENT_KEY]] >= of_one:
            raise OverloadedError(
                f"{of_one} requests of this client are in progress; the other {most - of_one} of "
                "max_requests are for other clients"
            )

    @contextlib.contextmanager
    def _counted(self, client: str) -> Iterator[None]:
        self._num_requests_of[client] += 1
        try:
            yield
        finally:
            self._num_requests_of[client] -= 1
            if not self._num_requests_of[client]:
                del self._num_requests_of[client]


def _count(scope: Scope, out: "_Sender", event: str) -> None:
    """Count and log a request that has ended. Lines of refused ones have a limit of their own."""
    path = scope["path"].removesuffix("/")
    label = path if path in _KNOWN_PATHS else "other"
    status = scope.get(STATUS_KEY, out.status)
    REQUESTS_TOTAL.labels(path=label, status=str(status)).inc()
    _log.info(event, path=label, status=status, client=scope.get(CLIENT_KEY, ""))


class _Sender:
    """Sends the messages of a response; adds the request id."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 500
        """Status of the response; 500 without one."""

    async def __call__(self, message: Message) -> None:
        """Send a message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            headers["x-content-type-options"] = "nosniff"
        await self._send(message)


def _trace_headers(headers: Headers) -> tuple[tuple[str, str], ...]:
    """Return the trace context of the caller (W3C); empty if it sent none or a wrong one."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _TRACE_PARENT.fullmatch(parent):
        return ()
    of_state = (("tracestate", state),) if _TRACE_STATE.fullmatch(state) else ()
    return (("traceparent", parent), *of_state)
