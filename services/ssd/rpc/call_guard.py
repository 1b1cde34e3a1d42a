"""The interceptor of every call: access, concurrency limit, request id, errors to statuses.

``CallGuard`` contains the only catch-all of the product. It converts the error of a servicer by the
table of ``rpc/status.py``. An error that is not in the table is a bug: its stack trace is logged
and the caller receives only the request id.
"""

import asyncio
import contextlib
import inspect
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ssd.errors import (
    CancelledError,
    DeadlineError,
    FieldError,
    InternalError,
    OverloadedError,
    RequestError,
    SSDError,
    UnsupportedError,
)
from ssd.observability import log
from ssd.rpc.access import Access
from ssd.rpc.bounds import MAX_MESSAGE_BYTES
from ssd.rpc.status import REQUEST_ID_KEY, Trailers, status_and_trailers

_log = log.get_logger(__name__)
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
MAX_REQUEST_ID_CHARACTERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits on the resources of callers."""

    message_bytes: int = MAX_MESSAGE_BYTES
    """Maximum size of a received message. gRPC refuses a longer one before it reads it."""
    calls: int = 1024
    """Maximum number of concurrent calls of one method. Each method has its own count, so many
    calls of one method block neither health checks nor the operator."""
    connections: int = 1024
    """Maximum number of connections; further ones are closed."""
    request_seconds: float = 30.0
    """Maximum time until the request of a call arrives. The call counts during this time."""
    unread_seconds: float = 30.0
    """Maximum time for which a call counts after its end, because its first message is not read.
    gRPC keeps this message until the caller leaves."""


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Replaces a message in a stream of requests if its bytes cannot be decoded."""

    reason: str


OnFailure = Callable[[str, Exception], None]
"""Called with the full method name and the error of each failed call."""


def current_request_id() -> str:
    """Return the id of the current call: the caller's ``x-request-id``, or a random one."""
    return log.request_id.get()


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Sets the request id of each call, refuses calls, and converts errors to statuses.

    It refuses callers without the role of the method, and calls over the concurrency limit.

    It serves every call as a bidirectional stream; the wire format is the same. So a request is
    read here, after the concurrency check, and only the servicer keeps a reference to it.

    It does not use ``context.abort``. The call keeps the exception of ``abort``, which refers to
    stack frames, which refer to the request and the call. Such a cycle keeps the request in memory
    until a garbage collection: 40 refused messages of 16 MiB kept 6 GB.
    """

    def __init__(self, limits: ServerLimits, on_failure: OnFailure, access: Access) -> None:
        self._limits = limits
        self._on_failure = on_failure
        self._access = access
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
        with contextlib.ExitStack() as place:
            answer = await self._answer(method, handler, requests, call, place)
            # A behaviour may end while its first write is cancelled but pending. The error has
            # ended, so that it keeps no frames while this waits.
            await call.settle(self._limits.unread_seconds)
            if answer is not None:
                call.end(*answer)

    async def _answer(
        self, method: str, handler: Any, requests: Any, call: "Call", place: contextlib.ExitStack
    ) -> tuple[grpc.StatusCode, str, Trailers] | None:
        """Run a call, which counts until ``place`` ends; return its status, None if it has one."""
        request_id = _begin(call)
        try:
            self._access.check(method, call)
            place.enter_context(self._count(method))
            await self._run(handler, requests, call)
        except grpc.aio.AbortError as error:
            # Raised by a servicer of another package. gRPC raises it again without the old frames.
            error.__traceback__ = None
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                self._on_failure(method, call.cancellation_cause())
                raise
            # The servicer cancelled its own work, not the call. gRPC would send no status.
            _log.exception("call_failed", method=method)
            bug = InternalError("the server cancelled its own work on this call")
            self._on_failure(method, bug)
            return status_and_trailers(bug, request_id)
        except grpc.aio.InternalError:
            # A write or read failed: the caller disconnected, and gRPC will cancel this call.
            self._on_failure(method, call.cancellation_cause())
            raise asyncio.CancelledError from None
        except Exception as error:  # noqa: BLE001 - the product's one catch-all
            error = _as_ours(method, error)
            self._on_failure(method, error)
            return status_and_trailers(error, request_id)
        return None

    async def _run(self, handler: Any, requests: Any, call: "Call") -> None:
        of_one = handler.unary_unary or handler.unary_stream
        behaviour = of_one or handler.stream_unary or handler.stream_stream
        # No variable refers to the request or the result, so only the servicer keeps them.
        if not handler.response_streaming:
            if handler.request_streaming:
                await call.write(await behaviour(_decoded(requests), call))
            else:
                await call.write(await behaviour(await self._request(call), call))
            return
        responses = behaviour(
            _decoded(requests) if handler.request_streaming else await self._request(call), call
        )
        if inspect.isawaitable(responses):
            await responses
        else:
            await _write_all(responses, call)

    @contextlib.contextmanager
    def _count(self, method: str) -> Iterator[None]:
        """Count a call of a method while it runs.

        Raises:
            OverloadedError: the limit is reached.
        """
        if self._num_calls[method] >= self._limits.calls:
            raise OverloadedError(
                f"{self._limits.calls} calls of {method} are running; try again later"
            )
        self._num_calls[method] += 1
        try:
            yield
        finally:
            self._num_calls[method] -= 1

    async def _request(self, call: "Call") -> Any:
        """Read the single request of a call.

        Raises:
            DeadlineError: it does not arrive in time.
            FieldError: it cannot be decoded.
            RequestError: there is none.
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
            raise FieldError("request", request.reason)
        return request


class Call:
    """A servicer's context whose first write cannot be cancelled.

    gRPC sends the headers together with the first message, and cannot send a status while that
    write is pending (``GRPC_CALL_ERROR_TOO_MANY_OPERATIONS``). If the caller of ``write`` is
    cancelled, the first write continues; ``settle`` waits until it ends.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._first: asyncio.Task[None] | None = None
        self._seconds_given: float | None = context.time_remaining()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Send a response. A cancelled first write is still sent."""
        if self._first is None:
            self._first = asyncio.create_task(self._write_first(message))
            self._first.add_done_callback(_ignore_result)
            await asyncio.shield(self._first)
        else:
            await self._context.write(message)

    async def _write_first(self, message: Any) -> None:
        # A status can follow the initial metadata, also before the client reads the message.
        await self._context.send_initial_metadata(())
        await self._context.write(message)

    async def settle(self, seconds: float) -> None:
        """Wait until the first message is sent, at most for so long.

        Raises:
            CancelledError: the caller disconnected, so that no status can be sent.
        """
        if self._first is None:
            return
        written, _ = await asyncio.wait({self._first}, timeout=seconds)
        if written and self._first.exception() is not None:
            raise asyncio.CancelledError

    def end(self, code: grpc.StatusCode, message: str, trailers: Trailers) -> None:
        """Set the status that the call has when its handler returns."""
        self._context.set_code(code)
        self._context.set_details(message)
        self._context.set_trailing_metadata(trailers)

    def cancellation_cause(self) -> SSDError:
        """Return the cause of a cancellation by the caller: its deadline, or its cancel."""
        left = self._context.time_remaining()
        # The caller's clock starts earlier, and gRPC rounds deadlines up by at most 1 %.
        if left is not None and left <= 0.05 + 0.02 * (self._seconds_given or 0.0):
            return DeadlineError("the caller's deadline passed")
        return CancelledError("the caller cancelled the call")


def _ignore_result(write: "asyncio.Task[None]") -> None:
    """Read the error of a write that no task waits for, so that asyncio does not log it."""
    if not write.cancelled():
        write.exception()


def _as_ours(method: str, error: Exception) -> Exception:
    """Return the error for the caller; log the stack trace of a bug."""
    if isinstance(error, NotImplementedError):  # raised by generated servicers
        return UnsupportedError(method.rpartition("/")[2])
    if not isinstance(error, SSDError | TimeoutError):
        _log.exception("call_failed", method=method)
    return error


def tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap a deserializer: it returns ``Undecodable`` for invalid bytes or invalid UTF-8."""

    def decode(payload: bytes) -> Any:
        try:
            return deserialize(payload)
        except DecodeError as error:
            return Undecodable(f"the message cannot be decoded: {error}")

    return decode


async def _decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Return the messages of a stream.

    Raises:
        FieldError: a message cannot be decoded.
    """
    async for request in requests:
        if isinstance(request, Undecodable):
            raise FieldError("request", request.reason)
        yield request


async def _write_all(responses: AsyncGenerator[Any, None], call: Call) -> None:
    """Write all responses. Close the generator at once if the caller disconnects."""
    async with contextlib.aclosing(responses):
        async for response in responses:
            await call.write(response)


def _begin(context: Any) -> str:
    sent_id = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY, "")
    is_usable = (
        isinstance(sent_id, str)
        and 1 <= len(sent_id) <= MAX_REQUEST_ID_CHARACTERS
        and sent_id.isprintable()
    )
    request_id = sent_id if is_usable else secrets.token_hex(8)
    log.request_id.set(request_id)
    return request_id


def ignore_failure(_method: str, _error: Exception) -> None:
    """Do nothing."""
