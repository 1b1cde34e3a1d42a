"""A gRPC server as every process runs it: limits, keepalive, health, errors as statuses, its port.

The catch-all of the whole product is here, in ``ErrorInterceptor``: what a servicer raises becomes
a status by the table of ``rpc/status.py``; what is in no table is a bug, whose stack goes to the
log and of which the caller learns the request id and nothing else.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ssd import telemetry
from ssd.errors import AddressError, RequestError, SSDError, UnsupportedError
from ssd.rpc.status import REQUEST_ID_KEY, abort_with

_log = telemetry.get_logger(__name__)
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_METADATA_BYTES = 16 * 1024
MAX_REQUEST_ID_CHARACTERS = 128
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
"""``so_reuseport`` off: a port in use is an error, never a silent share of its connections."""


@dataclass(frozen=True, slots=True)
class Undecodable:
    """What stands in a servicer's stream of requests for bytes that are no message."""

    reason: str


Register = Callable[[grpc.aio.Server], None]
"""Adds a servicer to a server: the generated function, with the servicer bound."""


def current_request_id() -> str:
    """Id of the call that is being served: the caller's ``x-request-id``, or one of our own."""
    return telemetry.request_id.get() or ""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Gives each call its request id and each error its status."""

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
        serializers = {
            "request_deserializer": _tolerant(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.request_streaming and handler.response_streaming:
            guarded = _guard_stream(method, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(guarded, **serializers)
        if handler.request_streaming:
            guarded = _guard_unary(method, handler.stream_unary)
            return grpc.stream_unary_rpc_method_handler(guarded, **serializers)
        if handler.response_streaming:
            guarded = _guard_stream(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(guarded, **serializers)
        guarded = _guard_unary(method, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(guarded, **serializers)


def _guard_unary(
    method: str, behaviour: Callable[..., Awaitable[Any]]
) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        request_id = _begin(context)
        try:
            _refuse_undecodable(request)
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001 - the product's one catch-all
            await _answer(context, method, error, request_id)

    return guarded


def _guard_stream(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Streams are generators, or coroutines that read and write the context."""

    async def guarded(request: Any, context: Any) -> None:
        request_id = _begin(context)
        try:
            _refuse_undecodable(request)
            responses = behaviour(request, context)
            if isinstance(responses, AsyncIterator):
                await _write_all(responses, context)
            else:
                await responses
        except Exception as error:  # noqa: BLE001 - the product's one catch-all
            await _answer(context, method, error, request_id)

    return guarded


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Bytes that are no message, or text that is not UTF-8, are the caller's fault, not ours."""

    def decode(payload: bytes) -> Any:
        try:
            return deserialize(payload)
        except DecodeError as error:
            return Undecodable(f"the message cannot be decoded: {error}")

    return decode


def _refuse_undecodable(request: object) -> None:
    if isinstance(request, Undecodable):
        raise RequestError(request.reason)


async def _write_all(responses: AsyncIterator[Any], context: Any) -> None:
    """Write a generator out; it is closed at once when the caller leaves, not by the collector."""
    try:
        async for response in responses:
            await context.write(response)
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


async def _answer(context: Any, method: str, error: Exception, request_id: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError):  # what generated servicers raise
        error = UnsupportedError(method.rpartition("/")[2])
    if not isinstance(error, SSDError | TimeoutError):
        _log.exception("call_failed", method=method)
    await abort_with(context, error, request_id)


def make_server(*, max_concurrent_calls: int | None = None) -> grpc.aio.Server:
    """A server without services and without a port. Asyncio loop."""
    return grpc.aio.server(
        interceptors=(ErrorInterceptor(),),
        options=OPTIONS,
        maximum_concurrent_rpcs=max_concurrent_calls,
    )


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind a server that is not started yet; returns the port, which differs if 0 was asked for.

    Raises:
        AddressError: naming the address, in use or not of this machine.
    """
    address = join_address(host, port)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressError(
            f"cannot listen on {address} for gRPC: it is in use or not of this machine; "
            "choose another --port, or 0 for any"
        ) from error
    if bound == 0:
        raise AddressError(
            f"cannot listen on {address} for gRPC; choose another --port, or 0 for any"
        )
    return bound


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class RpcServer:
    """A server's life: ``add`` services, ``start``, ``set_serving``, ``stop``. Asyncio loop.

    Health is NOT_SERVING, for each service and for the whole, until ``set_serving(True)``.
    """

    def __init__(self, host: str, port: int, *, reflection: bool = False) -> None:
        self._host = host
        self._asked_port = port
        self._reflection = reflection
        self._services: dict[str, Register] = {}
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._is_serving = False
        self._changes: set[asyncio.Task[None]] = set()
        self.port = 0
        """The port in use, after ``start``."""

    def add(self, service: str, register: Register) -> None:
        """Serve one more service, by its full name; before ``start``.

        ``server.add("ssd.v1.XService", partial(add_XServiceServicer_to_server, servicer))``
        """
        assert self._server is None
        self._services[service] = register

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            AddressError: the port is in use, or the address is not ours.
        """
        server = make_server()
        for register in self._services.values():
            register(server)
        statuses = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
        if self._reflection:
            names = (*self._services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        self.port = bind(server, self._host, self._asked_port)
        self._health = statuses
        await self._publish()
        await server.start()
        self._server = server

    def set_serving(self, is_serving: bool) -> None:  # noqa: FBT001 - a statement of fact
        """Say over ``grpc.health.v1`` whether requests are taken."""
        self._is_serving = is_serving
        if self._health is not None:
            change = asyncio.get_running_loop().create_task(self._publish())
            self._changes.add(change)
            change.add_done_callback(self._changes.discard)

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Refuse new calls, let running ones end for so long, cancel the rest. Idempotent."""
        if self._changes:
            await asyncio.wait(set(self._changes))
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_seconds)

    async def _publish(self) -> None:
        assert self._health is not None
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if self._is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", *self._services):
            await self._health.set(service, status)
