"""How links travel, as measured. Pure.

Nothing is concluded from where pods run: two pods on one node may use sockets.
"""

from ssd.rpc.pool_codec import LinkStatus
from ssd_operator.api.spec import Object
from ssd_operator.policy.snapshot import Snapshot

TOO_SLOW = "link_too_slow"
"""Beginning of the reason of a link that its target refused because of its measurements."""
_NAMES = {"tcp": "TCP", "rdma": "RDMA", "nvlink": "NVLink"}
"""Names in the status of what targets report."""
_CHANNELS = {"grpc": "TCP"}
"""Transport of links whose target is too old to report it, by their channel."""
_RANKS = {"TCP": 0, "RDMA": 1, "NVLink": 2}


def transport_of(link: LinkStatus) -> str:
    """Transport of a link; empty before it is known."""
    if link.transport:
        return _NAMES.get(link.transport, link.transport)
    return _CHANNELS.get(link.channel, link.channel) if link.state == "Active" else ""


def effective_transport(snapshot: Snapshot) -> Object:
    """The worst transport of the active links; empty without one."""
    active = [link for link in snapshot.links.values() if link.state == "Active"]
    found = sorted((transport_of(link) for link in active), key=_order)
    return {"effective": found[0]} if found else {}


def is_too_slow(link: LinkStatus) -> bool:
    """Whether its target refused it because of its measurements."""
    return link.state == "Refused" and link.reason.startswith(f"{TOO_SLOW}: ")


def sentence(link: LinkStatus) -> str:
    """Actual value, allowed value and fix, of a link that is too slow."""
    found = link.reason.removeprefix(f"{TOO_SLOW}: ")
    return f"{found} (transport.maxRoundTripMicroseconds)"


def _order(transport: str) -> tuple[int, str]:
    """Worst first; an unknown transport of a newer target counts as the worst."""
    return _RANKS.get(transport, 0), transport
