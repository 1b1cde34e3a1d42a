"""States of a draft and of a pool of drafts: dataclasses, and their messages.

``admin.proto`` and ``speculation.proto`` describe the fields.
"""

from dataclasses import asdict, dataclass
from typing import Any

from ssd.rpc.bounds import check_count, check_range
from ssd.rpc.codec import shared_fields
from ssd.rpc.link_codec import MAX_WORD_CHARACTERS
from ssd.v1 import admin_pb2, speculation_pb2

MAX_LINKS = 256
"""Maximum number of links of a target. The operator creates at most 64 drafts."""
MAX_REASON_CHARACTERS = 1024
"""Maximum length of the reason of a link that is sent. Longer ones are cut."""
_MAX_INTEGER = 2**53 - 1
"""Integers up to here are exact in JSON, and the API server accepts no larger ones."""
_MIN_FLOAT = -1e-6
"""A mean of zeros can be rounded to a little less than 0."""
_MAX_FLOAT = 1e18
_MAX_SECONDS = 1e6
"""No honest number is near these: a bandwidth is at most 2e16, and a link ends after seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """One target-draft connection, as the target reports it."""

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
    draft_weights: str = ""
    channel_reason: str = ""
    channel_round_trip_seconds: float = 0.0
    channel_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Links, sessions and hit rate of one target."""

    links: tuple[LinkStatus, ...] = ()
    running_sequences: int = 0
    waiting_sequences: int = 0
    hit_rate: float = 0.0
    eligible_sequences: float = 0.0
    """Running sequences in mode SPECULATIVE, and in AUTO while ``speculating``; mean over 30 s."""
    speculating: bool = True
    speculation_reason: str = ""
    speculation_speed_up: float = 0.0
    max_proposed_tokens: int = 0
    tokens_per_round: float = 0.0
    desired_draft_replicas: float = 0.0
    efficiency: float = 0.0
    weights_fingerprint: str = ""
    dtype: str = ""
    dtype_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStatus:
    """State of a draft."""

    model: str
    sessions: int
    max_sessions: int
    links: int
    draining: bool
    table_seconds: float
    dtype: str
    dtype_reason: str


_PREFIX = "LINK_STATE_"
_UNKNOWN = "unspecified"


def pool_status_response(pool: PoolStatus) -> admin_pb2.GetPoolStatusResponse:
    """Convert the state of a pool to its message."""
    links = [
        asdict(link)
        | {"state": _PREFIX + link.state.upper(), "reason": link.reason[:MAX_REASON_CHARACTERS]}
        for link in pool.links
    ]
    return admin_pb2.GetPoolStatusResponse(**asdict(pool) | {"links": links})


def pool_status(message: admin_pb2.GetPoolStatusResponse) -> PoolStatus:
    """Convert the message of a pool's state; an unknown state of a link is ``unspecified``.

    Raises:
        FieldError: there are too many links, a word is too long, or a number is out of bounds.
    """
    check_count("links", len(message.links), "entries", 0, MAX_LINKS)
    links = tuple(
        LinkStatus(
            state=_state(link.state), **_checked(f"links[{index}].", link, LinkStatus, "state")
        )
        for index, link in enumerate(message.links)
    )
    return PoolStatus(links=links, **_checked("", message, PoolStatus, "links"))


def _checked(path: str, message: object, kind: Any, *but: str) -> dict[str, Any]:
    """Return the shared fields of a target's message, which may be hostile.

    Readers compute with the numbers, and use the words as keys. The size of the message limits
    reasons.
    """
    fields = shared_fields(message, kind, *but)
    for name, field in fields.items():
        match field:
            case str() if not name.endswith("reason"):
                check_count(path + name, len(field), "characters", 0, MAX_WORD_CHARACTERS)
            case int():
                check_range(path + name, field, 0, _MAX_INTEGER)
            case float():
                highest = _MAX_SECONDS if name.endswith("_seconds") else _MAX_FLOAT
                check_range(path + name, field, _MIN_FLOAT, highest)
    return fields


def draft_status_response(status: DraftStatus) -> speculation_pb2.GetStatusResponse:
    """Convert the state of a draft to its message."""
    return speculation_pb2.GetStatusResponse(**asdict(status))


def draft_status(message: speculation_pb2.GetStatusResponse) -> DraftStatus:
    """Convert the message of a draft's state."""
    return DraftStatus(**shared_fields(message, DraftStatus))


def _state(number: admin_pb2.LinkState) -> str:
    is_known = number in admin_pb2.LinkState.values()
    name = admin_pb2.LinkState.Name(number) if is_known else _PREFIX + _UNKNOWN
    return name.removeprefix(_PREFIX).lower()
