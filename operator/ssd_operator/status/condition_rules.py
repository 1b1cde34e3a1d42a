"""The conditions of a resource: one rule for each type. Pure.

A cause has a reason of its own only if a person or a machine acts on it. The message has the rest.

*Decision*: of SpeculationActive, a transient loss counts after 30 s; a gain counts at once.
*Because* on a busy node links were lost and came back every 5 to 8 s: 11 Warning Events in 20
minutes that needed no action. *Not chosen*: the same delay for gains, because a new resource would
speculate for half a minute before its status shows it. *Revisit when* one resource still has more
than two warnings an hour.

*Decision*: NotWorthwhile appears and disappears after a target has kept its choice for a minute.
*Because* under load a target revised its choice 9 times in 156 s. *Not chosen*: to slow the choice
itself, which costs tokens. *Revisit when* a choice lasts for minutes and still alternates.
"""

from collections.abc import Callable, Mapping

from ssd_operator.observe.diff import differences
from ssd_operator.observe.pod_state import (
    cell_of,
    condition_in,
    condition_of,
    has_started,
    is_scheduled,
    is_unschedulable,
    name_of,
    to_seconds,
)
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.scaling import internal_scaling
from ssd_operator.status.pass_result import Condition, PassResult, no, unknown, yes
from ssd_operator.status.pod_rules import (
    draft_ready,
    gateway_ready,
    num_ready_cells,
    pool_missing,
    progressing,
    replicas_field,
    taken_names,
    target_ready,
)

HOLD_SECONDS = {"SpeculationActive": 30.0, "NotWorthwhile": 60.0}
"""How long a change of these conditions lasts before it is reported (``pending``)."""
_FIRST_ANSWER_SECONDS = 30.0
"""A target that has been ready for less may not have been polled yet."""
_REFUSALS = {
    "tokenizer_fingerprint": "TokenizerMismatch",
    "vocab_size": "VocabularyMismatch",
    "wire_version": "WireVersionMismatch",
    "link_too_slow": "LinkTooSlow",
}
"""Condition reason by the first word of the reason of a refused link: a field of the handshake, or
that its measured round trip is too long."""
_TRANSIENT = frozenset({"NoDrafts", "Quarantined"})
"""Reasons of a loss that may end without a change of pods or settings."""
_OF_TARGETS = frozenset({"TargetReady", "SpeculationActive", "NotWorthwhile"})
"""Conditions that a pool does not have."""


def conditions(result: PassResult) -> dict[str, Condition]:
    """All conditions by type, Ready first."""
    is_pool = result.snapshot.resource.is_pool
    by_type = {
        kind: condition
        for kind, rule in _RULES.items()
        if not (is_pool and kind in _OF_TARGETS) and (condition := rule(result)) is not None
    }
    return {"Ready": (_pool_ready(by_type) if is_pool else _ready(result, by_type)), **by_type}


def _pool_ready(others: Mapping[str, Condition]) -> Condition:
    """As many drafts as wanted are ready, unless objects are refused or another owner's."""
    parts = (others[kind] for kind in ("SpecValid", "ResourcesOwned"))
    return next((part for part in parts if part.status != "True"), others["DraftReady"])


def _ready(result: PassResult, others: Mapping[str, Condition]) -> Condition:
    """At least one target serves, and clients reach it and no other owner's pods.

    Otherwise the reason is that of the target, or of what prevents a first target.
    """
    snapshot = result.snapshot
    num_ready, num_cells = num_ready_cells(snapshot), snapshot.resource.spec.num_cells
    is_reached = any(name_of(pod) in snapshot.endpoints for pod in snapshot.ready_targets)
    if is_reached and result.has_endpoint and not snapshot.gateway_services_lost:
        reason = "Serving" if num_ready == num_cells else "ServingPartly"
        return yes(reason, f"{num_ready} of {num_cells} targets serve.")
    if snapshot.resource.spec.paused and not snapshot.target_deployments:
        return no("Paused", "spec.paused is true and no target exists; set it to false.")
    kinds = ["SpecValid", "ResourcesOwned", "TargetReady"]
    if num_ready:
        kinds = ["ResourcesOwned", "SpecValid"]
    elif snapshot.target_deployments:
        kinds = ["TargetReady", "SpecValid", "ResourcesOwned"]
    for kind in kinds:
        if others[kind].status != "True":
            return no(others[kind].reason, others[kind].message)
    state = "has no ready endpoint" if result.has_endpoint else "does not exist"
    service = f"the Service {snapshot.resource.name} {state}"
    return no("EndpointMissing", f"{num_ready} of {num_cells} targets are ready; {service}.")


def pending(result: PassResult) -> dict[str, float]:
    """Begin of the changes that are reported once they last for ``HOLD_SECONDS``, by condition.

    They are a transient loss of links, and another choice of a target to speculate or not.
    """
    snapshot, since, changes = result.snapshot, result.state.pending, dict[str, float]()
    links, groups = _links_now(snapshot), (snapshot.targets, snapshot.staying_drafts)
    is_lost = links.status == "False" and links.reason in _TRANSIENT
    have_started = all(any(map(has_started, pods)) for pods in groups)
    kind = "SpeculationActive"
    was_active = condition_in(snapshot.status, kind).get("status") == "True"
    if is_lost and have_started and snapshot.num_drafts_wanted and (kind in since or was_active):
        changes[kind] = since.get(kind, snapshot.now)
    kind = "NotWorthwhile"
    if (_slower_now(snapshot) is None) == bool(condition_in(snapshot.status, kind)):
        changes[kind] = since.get(kind, snapshot.now)
    return changes


def _is_held(result: PassResult, kind: str) -> bool:
    begin = pending(result).get(kind)
    return begin is not None and result.snapshot.now - begin < HOLD_SECONDS[kind]


def _speculation_active(result: PassResult) -> Condition:
    """Each target that serves has an active link; a short loss changes nothing."""
    before = condition_in(result.snapshot.status, "SpeculationActive")
    if before.get("status") == "True" and _is_held(result, "SpeculationActive"):
        return yes(before["reason"], before["message"])
    return _links_now(result.snapshot)


def _not_worthwhile(result: PassResult) -> Condition | None:
    """A target has decoded without its drafts for a while, because that is faster; else None."""
    before = condition_in(result.snapshot.status, "NotWorthwhile")
    if _is_held(result, "NotWorthwhile"):
        return yes(before["reason"], before["message"]) if before else None
    return _slower_now(result.snapshot)


def _links_now(snapshot: Snapshot) -> Condition:
    """Whether each target that serves has an active link at this moment."""
    if not snapshot.ready_targets:
        return no("NoDrafts", "No target is ready, so no draft has a link.")
    missing = pool_missing(snapshot)
    # Pods of a pool that is invalid or terminates may serve.
    if snapshot.num_drafts_wanted == 0 and not (missing and snapshot.active_links):
        return missing or no("NoDrafts", f"{replicas_field(snapshot)} is 0; scale up to speculate.")
    linked = {target for target, _ in snapshot.active_links}
    without = [pod for pod in snapshot.ready_targets if name_of(pod) not in linked]
    if not without:
        num_links, num_drafts = len(snapshot.active_links), len(snapshot.active_drafts)
        return yes("Active", f"Active links: {num_links}, to drafts: {num_drafts}.")
    answered = next((pod for pod in without if name_of(pod) in snapshot.answers), None)
    if answered is not None:
        return _unlinked(snapshot, name_of(answered))
    name = name_of(without[0])
    since = to_seconds(condition_of(without[0], "Ready").get("lastTransitionTime")) or 0.0
    if name not in snapshot.pools and snapshot.now - since < _FIRST_ANSWER_SECONDS:
        return no("NoDrafts", f"{name} has just become ready.")
    cause = f": {error.rstrip('.')}" if (error := snapshot.call_errors.get(name)) else ""
    return unknown("TargetUnreachable", f"{name} has not reported its links for 30 s{cause}.")


def _unlinked(snapshot: Snapshot, target: str) -> Condition:
    """Why a target that answers has no active link."""
    links = snapshot.answers[target].links
    by_state = {link.state: link for link in reversed(links)}
    link = by_state.get("refused") or by_state.get("quarantined")
    link = link or next((link for link in links if link.reason), None)
    if link is None:
        return no("NoDrafts", f"{target} has no active link.")
    reason, cause = "Quarantined" if link.state == "quarantined" else "NoDrafts", link.reason
    if link.state == "refused":
        word, _, rest = cause.partition(": ")
        reason = _REFUSALS.get(word, "NoDrafts")
        if reason == "LinkTooSlow":
            cause = f"{rest} (transport.maxRoundTripMicroseconds)"
    return no(reason, f"{target} and {link.draft_pod or link.address}: {cause}.")


def _slower_now(snapshot: Snapshot) -> Condition | None:
    """A target decodes without its drafts at this moment; None if no target does."""
    for name, answer in snapshot.answers.items():
        if not answer.speculating and answer.speculation_reason == "slower":
            # The message has no figure: each other message is a write of the status.
            return yes("Slower", f"{name} decodes without drafts, because that is faster.")
    return None


def _draft_capacity(result: PassResult) -> Condition | None:
    """The scheduler finds a node for each draft whose target has one; None for those of a pool.

    Drafts of a pool wait for no target.
    """
    snapshot, spec = result.snapshot, result.snapshot.resource.spec
    if snapshot.resource.pool_prefix is not None:
        return None
    placed = {cell_of(pod) for pod in snapshot.targets if is_scheduled(pod)}
    waiting = [
        pod
        for pod in snapshot.staying_drafts
        if is_unschedulable(pod)
        and (
            snapshot.resource.is_pool
            or (placed if spec.draft.sharing == "Pool" else cell_of(pod) in placed)
        )
    ]
    if not waiting:
        return yes("Sufficient", "No draft waits for a node.")
    cause = str(condition_of(waiting[0], "PodScheduled").get("message", "")).rstrip(".")
    missing, reason, less = (
        spec.draft.gpu_resource,
        "InsufficientLocalGPUs",
        replicas_field(snapshot),
    )
    if spec.is_gpu and spec.draft_device == "cpu":
        missing, reason = "cpu", "InsufficientLocalCPUs"
        less = "draft.replicas or the CPUs of draft.resources,"
    return no(
        reason if f"Insufficient {missing}" in cause else "Unschedulable",
        f"{len(waiting)} of {snapshot.num_drafts_wanted} drafts have no node; "
        f"lower {less} or add room: {cause}.",
    )


def _scaling_active(result: PassResult) -> Condition | None:
    """A scaler decides on the number of drafts; None without autoscaling."""
    snapshot, spec = result.snapshot, result.snapshot.resource.spec
    if spec.draft.autoscaling is None or spec.draft.autoscaling.mode == "None":
        return None
    if spec.paused:
        return no("Paused", "spec.paused is true: the number of drafts does not change.")
    if (bounds := internal_scaling(snapshot.resource)) is None:
        return yes("External", f"Another scaler writes {replicas_field(snapshot)}.")
    decision, demand = result.state.history.decision, result.state.history.demand
    if decision is None or decision.reason == "NoSamples":
        if snapshot.resource.is_pool and not snapshot.ready_targets:
            return yes("Internal", "No target is ready; the number of drafts stays.")
        return no(
            "NoSamples",
            "A target has not reported its running sequences for 30 s; the number of drafts stays.",
        )
    low, high = bounds.min_replicas, bounds.max_replicas
    message = f"The operator sets {decision.replicas} drafts, {low} to {high} are allowed"
    if demand is not None and demand.eligible is not None:
        sessions = f"{demand.sustainable_sessions:.0f} ({bounds.target_occupancy} of them used)"
        message += f"; {demand.eligible:.1f} sequences speculate, a draft sustains {sessions}"
        if demand.num_refused:
            message += f"; refused targets, each counted as one draft: {demand.num_refused}"
    if decision.reason == "Unschedulable":
        message += "; none is added while one has no node"
    return yes("Internal", f"{message}.")


def _spec_valid(result: PassResult) -> Condition:
    """The API server and the operator accept the spec, as far as a schema cannot decide it."""
    for ref, failure in sorted(result.results.failures.items()):
        if failure.cause == "Refused":
            reason = "PodTemplateInvalid" if ref.kind in ("Deployment", "Pod") else "ObjectRefused"
            return no(reason, f"{ref.kind} {ref.name} was refused: {failure.message}")
    return yes("Valid", "The spec is valid.")


def _resources_owned(result: PassResult) -> Condition:
    """All names are free or this resource's, and the operator may write the objects."""
    snapshot = result.snapshot
    if snapshot.foreign:
        taken = taken_names(snapshot, snapshot.foreign)
        return no("NameTaken", f"{taken}; rename or remove it, or rename this resource.")
    if failed := result.results.failed_calls:
        ref = min(failed)
        return no("Forbidden", f"{ref.kind} {ref.name} cannot be written: {failed[ref]}")
    for ref, failure in sorted(result.results.failures.items()):
        live = result.results.stored.get(ref, snapshot.children.get(ref))
        # After the repair that begins a pause, the object is as wanted until its next change.
        wanted = result.plan.wanted.get(ref, {}) if failure.paths else {}
        if not failure.paths.isdisjoint(differences(live or wanted, wanted)):
            return no("ApplyReverted", failure.message)
    return yes("Owned", "All objects belong to this resource.")


_RULES: Mapping[str, Callable[[PassResult], Condition | None]] = {
    "TargetReady": target_ready,
    "DraftReady": draft_ready,
    "GatewayReady": gateway_ready,
    "SpeculationActive": _speculation_active,
    "NotWorthwhile": _not_worthwhile,
    "DraftCapacity": _draft_capacity,
    "ScalingActive": _scaling_active,
    "Progressing": progressing,
    "SpecValid": _spec_valid,
    "ResourcesOwned": _resources_owned,
}
TYPES = frozenset({"Ready", *_RULES})
"""Conditions that a status may have; all others are of other writers."""
