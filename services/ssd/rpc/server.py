"""The gRPC server of every process: limits, keepalive, health, port."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ssd.errors import AddressError
from ssd.rpc.access import OPEN, Security
from ssd.rpc.bounds import MAX_MESSAGE_BYTES
from ssd.rpc.call_guard import CallGuard, OnFailure, ServerLimits, ignore_failure
from ssd.rpc.credentials import server_credentials
from ssd.rpc.listen import join_address

MAX_METADATA_BYTES = 16 * 1024
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 10),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 30_000),
)
"""``so_reuseport`` is off, so that a port in use is an error. Otherwise two processes share it. A
connection is closed if it sends 10 pings faster than one a second, does not complete its handshake
within 10 s, or has had no call for 30 to 60 s. All connections share one limit, and callers
without a token can open connections. Clients send one ping every 20 s. On a machine without free
CPUs, a server reads several at once, and stricter limits ended calls that waited for minutes.
"""

Register = Callable[[grpc.aio.Server], None]
"""Adds a servicer to a server: the generated function with the servicer as its first argument."""


class RpcServer:
    """A server: ``add`` services, ``start``, ``set_serving``, ``stop``. Asyncio loop.

    The health of the server and of each service is NOT_SERVING until ``set_serving(True)``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        reflection: bool = False,
        limits: ServerLimits | None = None,
        security: Security = OPEN,
        on_failure: OnFailure = ignore_failure,
    ) -> None:
        self._host = host
        self._requested_port = port
        self._reflection = reflection
        self._limits = limits or ServerLimits()
        self._security = security
        self._on_failure = on_failure
        self._services: dict[str, Register] = {}
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._is_serving = False
        self._changes: set[asyncio.Task[None]] = set()
        self.port = 0
        """The port in use, after ``start``."""

    def add(self, service: str, register: Register) -> None:
        """Add a service with its full name. Called before ``start``.

        ``server.add("ssd.v1.XService", partial(add_XServiceServicer_to_server, servicer))``
        """
        assert self._server is None
        self._services[service] = register

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            AddressError: the port is in use, or the machine does not have the address.
            SettingsError: a file of the certificates is missing or invalid.
        """
        server = grpc.aio.server(
            interceptors=(CallGuard(self._limits, self._on_failure, self._security.access),),
            options=(
                *OPTIONS,
                ("grpc.max_receive_message_length", self._limits.message_bytes),
                ("grpc.max_allowed_incoming_connections", self._limits.connections),
                # Above the calls that the guard admits, so that it refuses the ones over its limit.
                ("grpc.max_concurrent_streams", 4 * self._limits.calls),
            ),
        )
        for register in self._services.values():
            register(server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._reflection:
            names = (*self._services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        self.port = self._bind(server)
        await self._publish()
        await server.start()
        self._server = server

    def _bind(self, server: grpc.aio.Server) -> int:
        """Bind in plain text or with TLS; return the port, which the system chooses for port 0."""
        address = join_address(self._host, self._requested_port)
        tls = self._security.tls
        try:
            if tls is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, server_credentials(tls))
        except RuntimeError as error:
            raise AddressError(
                f"cannot listen on {address} for gRPC: it is in use, or this machine does not have "
                "it; choose another --port, or 0 for any"
            ) from error

    def set_serving(self, is_serving: bool) -> None:  # noqa: FBT001 - the state, not an option
        """Set the status of ``grpc.health.v1``."""
        self._is_serving = is_serving
        if self._health is not None:
            change = asyncio.get_running_loop().create_task(self._publish())
            self._changes.add(change)
            change.add_done_callback(self._changes.discard)

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Refuse new calls, wait for running calls, cancel the rest. Idempotent."""
        if self._changes:
            await asyncio.wait(set(self._changes))
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_seconds)

    async def _publish(self) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if self._is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", *self._services):
            await self._health.set(service, status)
