"""``ssd.v1.AdminService`` of every target: decode messages, delegate, encode the results."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from ssd.errors import UnsupportedError
from ssd.rpc import bounds, codec
from ssd.rpc.pool_codec import PoolStatus, pool_status_response
from ssd.rpc.server import RpcServer
from ssd.v1 import admin_pb2, admin_pb2_grpc

WATCH_SECONDS = 1.0
"""Interval at which ``WatchPool`` compares the status."""
MAX_DRAIN_MS = 3_600_000


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Status of the pool, speculation, and drain. Asyncio loop.

    ``drain`` is None on a target that does not own its requests: a drain is then UNIMPLEMENTED.
    """

    def __init__(
        self,
        status: Callable[[], PoolStatus],
        *,
        set_speculation: Callable[[codec.SpeculationChange], None],
        drain: Callable[[float], int] | None,
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        self._status = status
        self._set_speculation = set_speculation
        self._drain = drain
        self._watch_seconds = watch_seconds
        self._closing = asyncio.Event()

    def add_to(self, server: RpcServer) -> None:
        """Register the service."""
        register = partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, self)
        server.add("ssd.v1.AdminService", register)

    def close(self) -> None:
        """End all streams of ``WatchPool``, before the server stops."""
        self._closing.set()

    async def GetPoolStatus(  # noqa: N802 - the rpc's name
        self, _request: admin_pb2.GetPoolStatusRequest, _context: object
    ) -> admin_pb2.GetPoolStatusResponse:
        """Return the measured status of links, sessions and hit rates."""
        return pool_status_response(self._status())

    async def WatchPool(  # noqa: N802 - the rpc's name
        self, _request: admin_pb2.WatchPoolRequest, _context: object
    ) -> AsyncIterator[admin_pb2.WatchPoolResponse]:
        """Stream the status now and after each change, until the server stops."""
        sent: PoolStatus | None = None
        while not self._closing.is_set():
            status = self._status()
            if sent is None or has_changed(status, sent):
                sent = status
                yield admin_pb2.WatchPoolResponse(pool=pool_status_response(status))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._watch_seconds):
                    await self._closing.wait()

    async def SetSpeculation(  # noqa: N802 - the rpc's name
        self, request: admin_pb2.SetSpeculationRequest, _context: object
    ) -> admin_pb2.SetSpeculationResponse:
        """Change how the target speculates."""
        self._set_speculation(codec.speculation_change(request))
        return admin_pb2.SetSpeculationResponse()

    async def Drain(  # noqa: N802 - the rpc's name
        self, request: admin_pb2.DrainTargetRequest, _context: object
    ) -> admin_pb2.DrainTargetResponse:
        """Start the drain."""
        if self._drain is None:
            raise UnsupportedError(
                "Drain", "end vLLM by SIGTERM; its --shutdown-timeout is the time to drain"
            )
        bounds.check_range("deadline_ms", request.deadline_ms, 0, MAX_DRAIN_MS)
        return admin_pb2.DrainTargetResponse(requests=self._drain(request.deadline_ms / 1000))


def has_changed(status: PoolStatus, sent: PoolStatus) -> bool:
    """Whether a watcher needs the status; measurements that always change do not count."""
    return _without_measurements(status) != _without_measurements(sent)


def _without_measurements(status: PoolStatus) -> PoolStatus:
    return replace(
        status,
        links=tuple(replace(link, round_trip_seconds=0.0) for link in status.links),
        eligible_sequences=0.0,
        tokens_per_round=0.0,
        efficiency=0.0,
        speculation_speed_up=0.0,
        max_proposed_tokens=0,
        desired_draft_replicas=math.ceil(status.desired_draft_replicas),
    )
