"""States of a draft and of a pool of drafts: dataclasses, and their messages."""

from dataclasses import dataclass

from ssd.rpc.fields import shared_fields
from ssd.v1 import admin_pb2, speculation_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """One target-draft connection, as the target reports it; fields as in ``admin.proto``."""

    address: str
    state: str
    """``connecting``, ``active``, ``quarantined``, ``draining``, ``lost``, ``refused``."""
    epoch: int = 0
    sessions: int = 0
    sustainable_sessions: int = 0
    hits: int = 0
    misses: int = 0
    late: int = 0
    round_trip_seconds: float = 0.0
    channel: str = "grpc"
    reason: str = ""
    draft_pod: str = ""
    draft_node: str = ""
    transport: str = ""
    """Transport of the channel, for example ``tcp``; empty before the handshake."""
    draft_weights: str = ""
    """Fingerprint of the draft's weights; empty before the handshake."""
    channel_reason: str = ""
    """Why the channel is ``grpc`` although the target is set to ``collective``, or why a preferred
    backend is not used; else empty."""
    channel_round_trip_seconds: float = 0.0
    """Of 4 KiB over a collective channel, when the link came up."""
    channel_bytes_per_second: float = 0.0
    """Bandwidth of a collective channel, when the link came up."""
    draft_targets: int = 0
    """Targets that the draft served when the link came up; 0 before the handshake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Links, sessions and hit rate of one target."""

    links: tuple[LinkStatus, ...] = ()
    running_sequences: int = 0
    waiting_sequences: int = 0
    hit_rate: float = 0.0
    """Hits divided by rounds that needed a table, 0..1."""
    eligible_sequences: float = 0.0
    """For clients of earlier versions. Targets of earlier versions count all sequences in AUTO."""
    speculative_sequences: float | None = None
    """Running sequences in mode SPECULATIVE, and in AUTO while ``speculating``; mean over 30 s.
    None from a target of an earlier version."""
    speculating: bool = True
    """False while plain decoding is faster for requests in mode AUTO."""
    speculation_reason: str = ""
    """``measuring``, ``faster``, ``slower``; empty from a target of an older version."""
    speculation_speed_up: float = 0.0
    """Measured tokens/s over those of plain decoding; 0 before the first comparison."""
    max_proposed_tokens: int = 0
    """Maximum number of tokens of a proposal that the target chose."""
    tokens_per_round: float = 0.0
    desired_draft_replicas: float = 0.0
    """Drafts that the load fills, as a fraction."""
    efficiency: float = 0.0
    """T_verify / T_round of recent rounds, 0..1; 0 before the first."""
    weights_fingerprint: str = ""
    """Fingerprint of the target's weights."""
    dtype: str = ""
    """Data type of the target's weights and KV cache."""
    dtype_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStatus:
    """State of a draft; fields as in ``GetStatusResponse``."""

    model: str
    sessions: int
    max_sessions: int
    links: int
    draining: bool
    table_seconds: float
    dtype: str
    """Data type of weights and KV cache."""
    dtype_reason: str


_PREFIX = "LINK_STATE_"
_UNKNOWN = "unspecified"


def pool_status_response(pool: PoolStatus) -> admin_pb2.GetPoolStatusResponse:
    """Convert the state of a pool to its message."""
    links = [
        admin_pb2.LinkStatus(
            state=_PREFIX + link.state.upper(), **shared_fields(link, LinkStatus, "state")
        )
        for link in pool.links
    ]
    return admin_pb2.GetPoolStatusResponse(links=links, **shared_fields(pool, PoolStatus, "links"))


def pool_status(message: admin_pb2.GetPoolStatusResponse) -> PoolStatus:
    """Convert the message of a pool's state; an unknown state of a link is ``unspecified``."""
    links = tuple(
        LinkStatus(state=_state(link.state), **shared_fields(link, LinkStatus, "state"))
        for link in message.links
    )
    name = "speculative_sequences"
    speculative = message.speculative_sequences if message.HasField(name) else None
    values = shared_fields(message, PoolStatus, "links", name)
    return PoolStatus(links=links, speculative_sequences=speculative, **values)


def draft_status_response(status: DraftStatus) -> speculation_pb2.GetStatusResponse:
    """Convert the state of a draft to its message."""
    return speculation_pb2.GetStatusResponse(**shared_fields(status, DraftStatus))


def draft_status(message: speculation_pb2.GetStatusResponse) -> DraftStatus:
    """Convert the message of a draft's state."""
    return DraftStatus(**shared_fields(message, DraftStatus))


def _state(number: admin_pb2.LinkState) -> str:
    is_known = number in admin_pb2.LinkState.values()
    name = admin_pb2.LinkState.Name(number) if is_known else _PREFIX + _UNKNOWN
    return name.removeprefix(_PREFIX).lower()
