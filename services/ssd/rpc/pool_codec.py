"""The state of drafts and of the pool of drafts, as messages and as dataclasses."""

from dataclasses import dataclass

from ssd.v1 import admin_pb2, speculation_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """One target-draft connection, as the target sees it; the words of ``admin.proto``."""

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
    """How the bytes travel: ``tcp``, ``rdma``, ``nvlink``; empty before the handshake."""
    draft_weights: str = ""
    """Fingerprint of the draft's weights; empty before the handshake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Links, sessions and hit rate of one target."""

    links: tuple[LinkStatus, ...] = ()
    running_sequences: int = 0
    waiting_sequences: int = 0
    hit_rate: float = 0.0
    """Hits over rounds that needed a table, 0..1."""
    eligible_sequences: float = 0.0
    """Sequences running whose mode may speculate, mean over 30 s."""
    speculating: bool = True
    tokens_per_round: float = 0.0
    desired_draft_replicas: float = 0.0
    """Drafts that the load fills, as a fraction."""
    efficiency: float = 0.0
    """T_verify / T_round of recent rounds, 0..1; 0 before the first."""
    weights_fingerprint: str = ""
    """Of the target."""
    dtype: str = ""
    """Of the target's weights and KV."""
    dtype_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStatus:
    """What a draft is doing; the words of ``GetStatusResponse``."""

    model: str
    sessions: int
    max_sessions: int
    links: int
    draining: bool
    table_seconds: float
    dtype: str
    """Of weights and KV."""
    dtype_reason: str


_POOL_FACTS = [name for name in PoolStatus.__dataclass_fields__ if name != "links"]
_PREFIX = "LINK_STATE_"
_UNKNOWN = "unspecified"


def pool_status_response(pool: PoolStatus) -> admin_pb2.GetPoolStatusResponse:
    """The message of a pool's state."""
    facts = {name: getattr(pool, name) for name in _POOL_FACTS}
    links = [_link_message(link) for link in pool.links]
    return admin_pb2.GetPoolStatusResponse(links=links, **facts)


def pool_status(message: admin_pb2.GetPoolStatusResponse) -> PoolStatus:
    """A pool's state."""
    facts = {name: getattr(message, name) for name in _POOL_FACTS}
    return PoolStatus(links=tuple(_link(link) for link in message.links), **facts)


def draft_status_response(status: DraftStatus) -> speculation_pb2.GetStatusResponse:
    """The message of a draft's state."""
    return speculation_pb2.GetStatusResponse(
        **{name: getattr(status, name) for name in DraftStatus.__dataclass_fields__}
    )


def draft_status(message: speculation_pb2.GetStatusResponse) -> DraftStatus:
    """A draft's state."""
    return DraftStatus(
        **{name: getattr(message, name) for name in DraftStatus.__dataclass_fields__}
    )


def _link_message(link: LinkStatus) -> admin_pb2.LinkStatus:
    facts = {
        name: getattr(link, name) for name in LinkStatus.__dataclass_fields__ if name != "state"
    }
    return admin_pb2.LinkStatus(state=_PREFIX + link.state.upper(), **facts)


def _link(message: admin_pb2.LinkStatus) -> LinkStatus:
    facts = {
        name: getattr(message, name) for name in LinkStatus.__dataclass_fields__ if name != "state"
    }
    is_known = message.state in admin_pb2.LinkState.values()
    name = admin_pb2.LinkState.Name(message.state) if is_known else _PREFIX + _UNKNOWN
    return LinkStatus(state=name.removeprefix(_PREFIX).lower(), **facts)
