"""The condition SpeculationActive, without flapping. Pure.

*Decision*: a loss that may pass counts after 30 s; a gain counts at once. *Because* on a busy node
links were lost and came back every 5 to 8 s: 11 Warning Events in 20 minutes, and nothing to do
about them. *Not chosen*: the same delay for gains, because a new resource would speculate for half
a minute before its status shows it. *Revisit when* the warnings of one resource still exceed two
an hour.
"""

from ssd.rpc.pool_codec import LinkStatus
from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import has_started, name_of
from ssd_operator.policy.snapshot import Snapshot
from ssd_operator.status.conditions import Condition, Truth, condition_in, no, unknown, yes
from ssd_operator.status.transports import is_too_slow, sentence

KIND = "SpeculationActive"
HOLD_SECONDS = 30.0
"""A loss that may pass is reported if it lasts so long."""
_FIRST_ANSWER_SECONDS = 30.0
"""A target that is ready for less may not have been asked yet."""
_MISMATCHES = {
    "tokenizer_fingerprint": "TokenizerMismatch",
    "vocab_size": "VocabularyMismatch",
    "wire_version": "WireVersionMismatch",
}
"""Field of the handshake that a draft refused, as the reason of its link begins."""
_PASSING = frozenset({"NoDrafts", "Quarantined"})
"""Reasons that may pass without a change of pods or settings."""


def speculation_active(snapshot: Snapshot) -> Condition:
    """Whether each target that serves has an active link; a short loss changes nothing."""
    found, since = _links_now(snapshot), snapshot.planned.unlinked_since
    if since is None or snapshot.now - since >= HOLD_SECONDS:
        return found
    before = condition_in(snapshot.observed.status, KIND)
    return yes(KIND, before["reason"], before["message"]) if _was_true(before) else found


def unlinked_since(snapshot: Snapshot, before: float | None) -> float | None:
    """Begin of a loss that may pass; None if there is none.

    Args:
        snapshot: of this pass.
        before: the result of the pass before.
    """
    found = _links_now(snapshot)
    if found.truth is not Truth.FALSE or found.reason not in _PASSING or _has_cause(snapshot):
        return None
    if not _was_true(condition_in(snapshot.observed.status, KIND)):
        return before
    return snapshot.now if before is None else before


def _was_true(condition: Object) -> bool:
    return condition.get("status") == str(Truth.TRUE)


def _has_cause(snapshot: Snapshot) -> bool:
    """Whether links cannot come back as things are: no draft was asked for, or none is up."""
    pods_up = [any(map(has_started, pods)) for pods in (snapshot.targets, snapshot.staying_drafts)]
    return snapshot.num_drafts_wanted == 0 or not all(pods_up)


def _links_now(snapshot: Snapshot) -> Condition:
    """Whether each target that serves has an active link at this moment."""
    if not snapshot.ready_targets:
        return no(KIND, "NoDrafts", "No target serves yet, so no draft has a link.")
    if snapshot.num_drafts_wanted == 0:
        return no(KIND, "NoDrafts", "draft.replicas is 0; scale up to speculate.")
    without = [pod for pod in snapshot.ready_targets if not snapshot.is_linked(pod)]
    answered = [pod for pod in without if name_of(pod) in snapshot.answers]
    if answered:
        return _unlinked(snapshot, answered[0])
    if without:
        return _silent(snapshot, without[0])
    num_links = sum(link.state == "Active" for link in snapshot.links.values())
    num_drafts = len(snapshot.active_drafts)
    return yes(KIND, "Active", f"Active links: {num_links}, to drafts: {num_drafts}.")


def _unlinked(snapshot: Snapshot, target: Object) -> Condition:
    """Why a target that answers has no active link."""
    name = name_of(target)
    links = snapshot.answers[name].links
    refused = next((link for link in links if link.state == "Refused"), None)
    quarantined = next((link for link in links if link.state == "Quarantined"), None)
    link = refused or quarantined or next((link for link in links if link.reason), None)
    if link is None:
        return no(KIND, "NoDrafts", f"{name} has no active link.")
    reason = _refusal(link) if refused else "Quarantined" if quarantined else "NoDrafts"
    draft = link.draft_pod or link.address
    words = sentence(link) if is_too_slow(link) else link.reason
    return no(KIND, reason, f"{name} and {draft}: {words}.")


def _refusal(link: LinkStatus) -> str:
    return (
        "LinkTooSlow"
        if is_too_slow(link)
        else _MISMATCHES.get(link.reason.partition(":")[0], "NoDrafts")
    )


def _silent(snapshot: Snapshot, target: Object) -> Condition:
    """A target that did not answer: has it not been asked yet, or is it out of reach?"""
    age = snapshot.ready_seconds(target)
    name = name_of(target)
    is_new = name not in snapshot.observed.pools and age is not None and age < _FIRST_ANSWER_SECONDS
    if is_new:
        return no(KIND, "NoDrafts", f"{name} has just started to serve.")
    return unknown(KIND, "TargetUnreachable", f"{name} has not reported its links for 30 s.")
