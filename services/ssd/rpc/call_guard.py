"""What surrounds every call that a server serves: a place, a request id, a status for each error.

The catch-all of the whole product is here, in ``CallGuard``: what a servicer raises becomes a
status by the table of ``rpc/status.py``; what is in no table is a bug, whose stack goes to the log
and of which the caller learns the request id and nothing else.
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ssd import telemetry
from ssd.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    OverloadedError,
    RequestError,
    SSDError,
    UnsupportedError,
)
from ssd.rpc.bounds import MAX_MESSAGE_BYTES
from ssd.rpc.status import REQUEST_ID_KEY, Trailers, status_and_trailers

_log = telemetry.get_logger(__name__)
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
MAX_REQUEST_ID_CHARACTERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What callers can make a server hold."""

    message_bytes: int = MAX_MESSAGE_BYTES
    """Of one message that is received. gRPC refuses a longer one before it reads it."""
    calls: int = 1024
    """Calls of one method at a time. Each method has its own count, so that a flood of one method
    blocks neither health checks nor the questions of the operator."""
    request_seconds: float = 30.0
    """How long a call may take to send its request; until then it holds a place."""


@dataclass(frozen=True, slots=True)
class Undecodable:
    """What stands in a servicer's stream of requests for bytes that are no message."""

    reason: str


OnFailure = Callable[[str, Exception], None]
"""Receives the full method name and the error of each call that ends with an error."""


def current_request_id() -> str:
    """Id of the call that is being served: the caller's ``x-request-id``, or one of our own."""
    return telemetry.request_id.get() or ""


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Gives each call a request id, a place among the calls of its method, and errors a status.

    Every call is served as a stream in both directions, whatever its kind; on the wire that is the
    same. So a request is read here, once its call has a place, and only the servicer holds it.

    Errors are never sent by ``context.abort``: its exception, which the call keeps, refers to the
    frames it passed through, and these to the request and the call. Such a cycle holds the request
    until a garbage collection. 40 refused messages of 16 MiB left 6 GB.
    """

    def __init__(self, limits: ServerLimits, on_failure: OnFailure) -> None:
        self._limits = limits
        self._on_failure = on_failure
        self._num_calls: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        async def guarded(requests: Any, context: Any) -> None:
            await self._serve(method, handler, requests, Call(context))

        return grpc.stream_stream_rpc_method_handler(
            guarded,
            request_deserializer=tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    async def _serve(self, method: str, handler: Any, requests: Any, call: "Call") -> None:
        request_id = _begin(call)
        try:
            with self._place(method):
                await self._run(handler, requests, call)
            return
        except grpc.aio.AbortError as error:
            # Of a servicer that is not ours. gRPC raises it again, from no frame that holds much.
            error.__traceback__ = None
            return
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                self._on_failure(method, call.why_cancelled())
                raise
            # What the servicer awaited was cancelled, not this call. gRPC would send no status.
            _log.exception("call_failed", method=method)
            bug = InternalError("the server cancelled its own work on this call")
            self._on_failure(method, bug)
            answer = status_and_trailers(bug, request_id)
        except grpc.aio.InternalError:
            # A failed write or read: the caller has gone, and gRPC is about to cancel this call.
            self._on_failure(method, call.why_cancelled())
            raise asyncio.CancelledError from None
        except Exception as error:  # noqa: BLE001 - the product's one catch-all
            error = _as_ours(method, error)
            self._on_failure(method, error)
            answer = status_and_trailers(error, request_id)
        # Outside of the except clause: while a reader is waited for, the error holds no frames.
        await call.settle()
        call.end(*answer)

    async def _run(self, handler: Any, requests: Any, call: "Call") -> None:
        behaviour = next(
            each
            for each in (
                *(handler.unary_unary, handler.unary_stream),
                *(handler.stream_unary, handler.stream_stream),
            )
            if each is not None
        )
        # Neither the request nor the result is kept in a variable: only the servicer holds them.
        if not handler.response_streaming:
            if handler.request_streaming:
                await call.write(await behaviour(_decoded(requests), call))
            else:
                await call.write(await behaviour(await self._request(call), call))
            return
        responses = behaviour(
            _decoded(requests) if handler.request_streaming else await self._request(call), call
        )
        if isinstance(responses, AsyncIterator):
            await _write_all(responses, call)
        else:
            await responses

    @contextlib.contextmanager
    def _place(self, method: str) -> Iterator[None]:
        """Hold a place among the calls of a method.

        Raises:
            OverloadedError: all are taken.
        """
        if self._num_calls[method] >= self._limits.calls:
            raise OverloadedError(
                f"{self._limits.calls} calls of {method} are being served; try again later"
            )
        self._num_calls[method] += 1
        try:
            yield
        finally:
            self._num_calls[method] -= 1

    async def _request(self, call: "Call") -> Any:
        """Read the one message of a call.

        Raises:
            DeadlineError: it does not come.
            RequestError: there is none, or it cannot be decoded.
        """
        seconds = self._limits.request_seconds
        try:
            async with asyncio.timeout(seconds):
                request = await call.read()
        except TimeoutError as error:
            raise DeadlineError(f"the request did not arrive within {seconds:g} s") from error
        if request is _EOF:
            raise RequestError(
                f"no request arrived, or one longer than {self._limits.message_bytes} bytes"
            )
        if isinstance(request, Undecodable):
            raise RequestError(request.reason)
        return request


class Call:
    """A servicer's context, whose first write is never cancelled.

    gRPC sends the headers together with the first message, and no status while that write is
    pending (``GRPC_CALL_ERROR_TOO_MANY_OPERATIONS``). A first write that is not waited for any
    longer goes on by itself; ``settle`` waits until it has left or the caller has gone.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._first: asyncio.Task[None] | None = None
        self._seconds_given: float | None = context.time_remaining()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Send a response; when cancelled, a first one is still sent."""
        if self._first is None:
            self._first = asyncio.create_task(self._context.write(message))
            self._first.add_done_callback(_forget_result)
            await asyncio.shield(self._first)
        else:
            await self._context.write(message)

    async def settle(self) -> None:
        """Wait until a status can be sent.

        Raises:
            CancelledError: never, because the caller has gone.
        """
        if self._first is None:
            return
        await asyncio.wait({self._first})
        if self._first.exception() is not None:
            raise asyncio.CancelledError

    def end(self, code: grpc.StatusCode, message: str, trailers: Trailers) -> None:
        """Have the call end with this status when its handler returns."""
        self._context.set_code(code)
        self._context.set_details(message)
        self._context.set_trailing_metadata(trailers)

    def why_cancelled(self) -> SSDError:
        """What the end of a call by its caller is: its deadline or its wish."""
        left = self._context.time_remaining()
        # A caller's clock starts before ours, and gRPC rounds deadlines up by 1 % at most.
        if left is not None and left <= 0.05 + 0.02 * (self._seconds_given or 0.0):
            return DeadlineError("the caller's deadline passed")
        return CancelledError("the caller cancelled the call")


def _forget_result(write: "asyncio.Task[None]") -> None:
    """Take the error of a write that is not waited for: its caller has gone."""
    if not write.cancelled():
        write.exception()


def _as_ours(method: str, error: Exception) -> Exception:
    """The error that the caller receives; what is our own fault is logged with its stack."""
    if isinstance(error, NotImplementedError):  # what generated servicers raise
        return UnsupportedError(method.rpartition("/")[2])
    if not isinstance(error, SSDError | TimeoutError):
        _log.exception("call_failed", method=method)
    return error


def tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Bytes that are no message, or text that is not UTF-8, are the caller's fault, not ours."""

    def decode(payload: bytes) -> Any:
        try:
            return deserialize(payload)
        except DecodeError as error:
            return Undecodable(f"the message cannot be decoded: {error}")

    return decode


async def _decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The messages of a stream.

    Raises:
        RequestError: one of them cannot be decoded.
    """
    async for request in requests:
        if isinstance(request, Undecodable):
            raise RequestError(request.reason)
        yield request


async def _write_all(responses: AsyncIterator[Any], call: Call) -> None:
    """Write a generator out; it is closed at once when the caller leaves, not by the collector."""
    try:
        async for response in responses:
            await call.write(response)
    finally:
        close = getattr(responses, "aclose", None)
        if close is not None:
            await close()


def _begin(context: Any) -> str:
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY, "")
    is_usable = (
        isinstance(given, str)
        and 1 <= len(given) <= MAX_REQUEST_ID_CHARACTERS
        and given.isprintable()
    )
    request_id = given if is_usable else secrets.token_hex(8)
    telemetry.request_id.set(request_id)
    return request_id


def ignore_failure(_method: str, _error: Exception) -> None:
    """Count nothing."""
