"""The tensor channel of a link over gRPC, and what all channels of a link share. No torch."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from ssd.errors import HandshakeError
from ssd.rpc.link import LinkCall, LinkFrames, LinkServerCall
from ssd.speculation.table import row_width
from ssd.transport.frame import ChannelQuality, FrameLimits, TensorChannel
from ssd.transport.grpc_channel import GrpcChannel
from ssd.types import Hello, Welcome

GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class LinkChannel:
    """The tensor channel of a link."""

    channel: TensorChannel
    name: str = GRPC
    """``grpc`` or ``collective``."""
    reason: str = ""
    """Why it is gRPC although the target asked for a collective channel, or why backends that were
    tried first are not used."""
    last_error: str = ""
    """Why the last backend is not used; the part of ``reason`` that the draft has not sent yet."""
    quality: ChannelQuality | None = None
    """The measurement of a collective channel."""


OfferChannel = Callable[[LinkCall, Hello, Welcome, str], Awaitable[LinkChannel]]
"""Returns the target's end of the channel, after a Welcome of the draft at an address."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What fixes the largest frames of a link."""

    max_sessions: int
    branches: int
    lookahead: int

    @classmethod
    def of(cls, welcome: Welcome) -> Self:
        """Return the shape to which both ends have agreed."""
        return cls(welcome.max_sessions, welcome.branches, welcome.lookahead)

    @property
    def commits(self) -> FrameLimits:
        """The largest frame of a target: one commit of each session."""
        return FrameLimits(max_rows=max(1, self.max_sessions), max_width=row_width(self.lookahead))

    @property
    def tables(self) -> FrameLimits:
        """The largest frame of a draft: one table of each session."""
        return FrameLimits(
            max_rows=max(1, self.max_sessions) * (self.branches + 1),
            max_width=row_width(self.lookahead),
        )

    def frames_of(self, call: LinkCall | LinkServerCall) -> GrpcChannel:
        """Return the channel inside the gRPC stream of a link."""
        return GrpcChannel(LinkFrames(call), self.tables)


async def offer_grpc(call: LinkCall, _hello: Hello, welcome: Welcome, _address: str) -> LinkChannel:
    """Return the channel of a target that has no collective backends.

    Raises:
        HandshakeError: the draft chose a backend.
    """
    if welcome.backends:
        raise HandshakeError(
            "backends", f"the draft chose {', '.join(welcome.backends)}, this target has none"
        )
    return LinkChannel(LinkShape.of(welcome).frames_of(call))
