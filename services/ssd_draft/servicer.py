"""The gRPC service of a draft: links, status, drain."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from ssd.errors import NotReadyError
from ssd.rpc.bounds import check_range
from ssd.rpc.link import LinkServerCall
from ssd.rpc.pool_codec import DraftStatus, draft_status_response
from ssd.rpc.server import RpcServer
from ssd.v1 import speculation_pb2 as pb2
from ssd.v1 import speculation_pb2_grpc
from ssd_draft.link_server import LinkServer

MAX_DRAIN_MS = 300_000
Context = Any


class SpeculationServicer(speculation_pb2_grpc.SpeculationServiceServicer):
    """``ssd.v1.SpeculationService``. Asyncio loop."""

    def __init__(
        self,
        links: LinkServer,
        *,
        is_ready: Callable[[], bool],
        status: Callable[[], DraftStatus],
        drain: Callable[[float], int],
    ) -> None:
        self._links = links
        self._is_ready = is_ready
        self._status = status
        self._drain = drain

    def add_to(self, server: RpcServer) -> None:
        """Register the service at ``server``."""
        register = partial(speculation_pb2_grpc.add_SpeculationServiceServicer_to_server, self)
        server.add("ssd.v1.SpeculationService", register)

    async def Speculate(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb2.SpeculateRequest], context: Context
    ) -> None:
        """Serve one link until it ends."""
        del request_iterator
        if not self._is_ready():
            raise NotReadyError("the draft is loading; try again")
        async with LinkServerCall(context, bounds=self._links.opening_bounds) as call:
            await self._links.serve(call)

    async def GetStatus(  # noqa: N802 - gRPC's name
        self, request: pb2.GetStatusRequest, context: Context
    ) -> pb2.GetStatusResponse:
        """Return the state of the draft."""
        del request, context
        return draft_status_response(self._status())

    async def Drain(  # noqa: N802 - gRPC's name
        self, request: pb2.DrainDraftRequest, context: Context
    ) -> pb2.DrainDraftResponse:
        """Begin to drain; returns at once."""
        del context
        check_range("deadline_ms", request.deadline_ms, 0, MAX_DRAIN_MS)
        return pb2.DrainDraftResponse(sessions=self._drain(request.deadline_ms / 1000))
