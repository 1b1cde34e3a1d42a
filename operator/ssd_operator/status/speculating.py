"""The condition SpeculationActive. Pure.

*Decision*: a loss that may pass counts after 30 s; a gain counts at once. *Because* on a busy node
links were lost and came back every 5 to 8 s: 11 Warning Events in 20 minutes that needed no action.
*Not chosen*: the same delay for gains, because a new resource would speculate for half a minute
before its status shows it. *Revisit when* one resource still has more than two warnings an hour.
"""

from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import has_started, name_of
from ssd_operator.status.conditions import Condition, Truth, condition_in, no, unknown, yes
from ssd_operator.status.pass_result import PassResult

HOLD_SECONDS = 30.0
"""A loss that may pass is reported if it lasts this long."""
_FIRST_ANSWER_SECONDS = 30.0
"""A target that has been ready for less may not have been polled yet."""
_MISMATCHES = {
    "tokenizer_fingerprint": "TokenizerMismatch",
    "vocab_size": "VocabularyMismatch",
    "wire_version": "WireVersionMismatch",
}
"""Condition reason by the field of the handshake with which the reason of a refused link begins."""
_PASSING = frozenset({"NoDrafts", "Quarantined"})
"""Reasons that may pass without a change of pods or settings."""
_TOO_SLOW = "link_too_slow: "
"""Begin of the reason of a link that its target refused because of its measured round trip."""


def speculation_active(result: PassResult) -> Condition:
    """Each target that serves has an active link; a short loss changes nothing."""
    since, before = unlinked_since(result), condition_in(result.status, "SpeculationActive")
    is_held = since is not None and result.now - since < HOLD_SECONDS
    if is_held and before.get("status") == Truth.TRUE:
        return yes(before["reason"], before["message"])
    return _links_now(result)


def unlinked_since(result: PassResult) -> float | None:
    """Begin of a loss of links that may pass; None if there is none."""
    found = _links_now(result)
    if found.truth is not Truth.FALSE or found.reason not in _PASSING or not _may_recover(result):
        return None
    was_active = condition_in(result.status, "SpeculationActive").get("status") == Truth.TRUE
    return result.now if result.unlinked_since is None and was_active else result.unlinked_since


def _may_recover(result: PassResult) -> bool:
    """Whether links can come back as things are: drafts are wanted, and both sides have started."""
    groups = (result.targets, result.staying_drafts)
    return result.num_drafts_wanted > 0 and all(any(map(has_started, pods)) for pods in groups)


def _links_now(result: PassResult) -> Condition:
    """Whether each target that serves has an active link at this moment."""
    if not result.ready_targets:
        return no("NoDrafts", "No target is ready, so no draft has a link.")
    if result.num_drafts_wanted == 0:
        return no("NoDrafts", "draft.replicas is 0; scale up to speculate.")
    without = [pod for pod in result.ready_targets if not result.is_linked(pod)]
    for pod in without:
        if name_of(pod) in result.answers:
            return _unlinked(result, name_of(pod))
    if without:
        return _unanswered(result, without[0])
    num_links = sum(link.state == "Active" for link in result.links.values())
    num_drafts = len(result.active_drafts)
    return yes("Active", f"Active links: {num_links}, to drafts: {num_drafts}.")


def _unlinked(result: PassResult, target: str) -> Condition:
    """Why a target that answers has no active link."""
    links = result.answers[target].links
    by_state = {link.state: link for link in reversed(links)}
    link = by_state.get("Refused") or by_state.get("Quarantined")
    link = link or next((link for link in links if link.reason), None)
    if link is None:
        return no("NoDrafts", f"{target} has no active link.")
    cause = link.reason
    if link.state != "Refused":
        reason = "Quarantined" if link.state == "Quarantined" else "NoDrafts"
    elif cause.startswith(_TOO_SLOW):
        reason = "LinkTooSlow"
        cause = f"{cause.removeprefix(_TOO_SLOW)} (transport.maxRoundTripMicroseconds)"
    else:
        reason = _MISMATCHES.get(cause.partition(":")[0], "NoDrafts")
    return no(reason, f"{target} and {link.draft_pod or link.address}: {cause}.")


def _unanswered(result: PassResult, target: Object) -> Condition:
    """The condition of a target that did not answer lately."""
    age, name = result.ready_seconds(target), name_of(target)
    is_new = name not in result.pools and age is not None and age < _FIRST_ANSWER_SECONDS
    if is_new:
        return no("NoDrafts", f"{name} has just become ready.")
    return unknown("TargetUnreachable", f"{name} has not reported its links for 30 s.")
