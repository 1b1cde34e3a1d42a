"""How links travel, as measured, against what was asked for. Pure.

Nothing is concluded from where pods run: two on one node may talk over sockets.
"""

from ssd_operator.census import Census
from ssd_operator.conditions import Condition, no, unknown, yes
from ssd_operator.facts import LinkFact
from ssd_operator.spec import Object, Tier, Transport

TOO_SLOW = "link_too_slow"
"""How the reason of a link begins that its target refused for what was measured on it."""
_NAMES = {"tcp": "TCP", "rdma": "RDMA", "nvlink": "NVLink"}
"""What users call what targets report."""
_CHANNELS = {"grpc": "TCP"}
"""How links travel whose target is older than that report, by their channel."""
_RANKS = {"Any": 0, "TCP": 0, "RDMA": 1, "NVLink": 2}
_ASKED_BY_TIER = {Tier.TCP: "Any", Tier.RDMA: "RDMA", Tier.NVLINK_PRIVILEGED: "NVLink"}


def transport_of(link: LinkFact) -> str:
    """How a link travels; empty while nobody knows."""
    if link.transport:
        return _NAMES.get(link.transport, link.transport)
    return _CHANNELS.get(link.channel, link.channel) if link.state == "Active" else ""


def transport_block(census: Census) -> Object:
    """The worst of the active links, and what was asked for."""
    asked = census.resource.spec.transport
    why = f"tier {asked.tier}"
    if asked.rdma is not None:
        why += f" with {asked.rdma.resource_name}"
    elif asked.tier == "Auto":
        why += ", no fabric asked for"
    if asked.require != "Any":
        why += f", {asked.require} required"
    found = sorted((transport_of(link) for link in _active(census)), key=_order)
    return {"effective": found[0], "reason": why} if found else {"reason": why}


def fast_path(census: Census) -> Condition | None:
    """Whether links are as fast as the tier or ``require`` asks; None where neither does."""
    kind, asked = "FastPath", _asked(census.resource.spec.transport)
    if _RANKS[asked] == 0:
        return None
    for (target, draft), link in census.links.items():
        if is_too_slow(link):
            return no(kind, "SlowerThanRequired", f"{target} and {draft}: {sentence(link)}.")
    found = [transport_of(link) for link in _active(census)]
    if not found:
        return unknown(
            kind, "Unverified", f"{asked} is asked for; no link is active that could show it."
        )
    slower = [each for each in found if _RANKS.get(each, 0) < _RANKS[asked]]
    if not slower:
        return yes(kind, "Verified", f"{len(found)} of {len(found)} links have {asked} or better.")
    return no(
        kind,
        "FellBack",
        f"{len(slower)} of {len(found)} links run over {min(slower, key=_order)}, {asked} is asked "
        "for; the channel that reaches it comes with the CUDA engine, text is served meanwhile.",
    )


def is_too_slow(link: LinkFact) -> bool:
    """Whether its target refused it for what was measured on it."""
    return link.state == "Refused" and link.reason.startswith(f"{TOO_SLOW}: ")


def sentence(link: LinkFact) -> str:
    """What was found, what is allowed and the cure, of a link that is too slow."""
    found = link.reason.removeprefix(f"{TOO_SLOW}: ")
    return f"{found} (transport.require, transport.maxRoundTripMicroseconds)"


def _asked(transport: Transport) -> str:
    by_tier = _ASKED_BY_TIER[transport.effective_tier]
    return max(by_tier, transport.require, key=lambda name: _RANKS[name])


def _active(census: Census) -> list[LinkFact]:
    return [link for link in census.links.values() if link.state == "Active"]


def _order(transport: str) -> tuple[int, str]:
    """Worst first; a transport of a newer target proves nothing here."""
    return _RANKS.get(transport, 0), transport
