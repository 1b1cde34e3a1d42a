"""What is true of a resource, as its status tells it. Pure.

There is no phase: conditions are the truth, and the blocks beside them hold the numbers.
"""

import re
from collections.abc import Callable, Iterable
from statistics import fmean

from ssd_operator.api.spec import Object, Resource
from ssd_operator.api.status import MOST_LINKS
from ssd_operator.children.names import TARGET_PORT, Component, cell_of, selector
from ssd_operator.observe.facts import Observed, PoolFact
from ssd_operator.observe.pod_state import is_ready, is_scheduled, name_of, to_text
from ssd_operator.policy.snapshot import Planned, Snapshot
from ssd_operator.status.condition_rules import verdicts
from ssd_operator.status.conditions import LONGEST_MESSAGE, merge, no, unknown
from ssd_operator.status.transports import effective_transport, transport_of

_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


def status_of(resource: Resource, observed: Observed, planned: Planned, now: float) -> Object:
    """The whole status.

    Args:
        resource: as it was parsed.
        observed: the snapshot of this pass; its ``status`` gives the times of old transitions.
        planned: what this pass decided.
        now: seconds since the epoch.
    """
    snapshot = Snapshot(resource=resource, observed=observed, planned=planned, now=now)
    old = observed.status
    status: Object = {
        "observedGeneration": resource.generation,
        "conditions": merge(
            old.get("conditions") or [], verdicts(snapshot), resource.generation, to_text(now)
        ),
        "model": _model(snapshot),
        "target": _target(snapshot),
        "draft": _draft(snapshot),
        "transport": effective_transport(snapshot),
        "links": _links(snapshot),
        "speculation": _speculation(snapshot),
    }
    if snapshot.has_endpoint:
        host = f"{resource.name}.{resource.namespace}.svc"
        status["endpoint"] = {"grpc": f"{host}:{TARGET_PORT}"}
    return {name: value for name, value in status.items() if value or name == "links"}


def status_of_invalid(old: Object, generation: int, problem: tuple[str, str], now: float) -> Object:
    """The status of a resource that could never be read; what was made of it is not looked at.

    It may serve on, or not: nobody who can say so knows what to look for.

    Args:
        old: the present status.
        generation: of the resource.
        problem: reason and message.
        now: seconds since the epoch.
    """
    before: list[Object] = old.get("conditions") or []
    reason, message = problem
    others = [each["type"] for each in before if each["type"] not in ("Ready", "SpecValid")]
    unread = f"The spec cannot be read, so nothing is looked at or repaired: {message}"
    was_read = bool(others)
    news = [
        unknown("Ready", reason, unread) if was_read else no("Ready", reason, message),
        *(unknown(kind, reason, unread) for kind in others),
        no("SpecValid", reason, message),
    ]
    conditions = merge(before, news, generation, to_text(now))
    return old | {"observedGeneration": generation, "conditions": conditions}


def _model(snapshot: Snapshot) -> Object:
    """The name, and which weights run, as far as those who run them agree.

    A target that is not heard at the moment speaks with the last status.
    """
    is_heard = len(snapshot.answers) == len(snapshot.ready_targets)
    old = {} if is_heard else snapshot.observed.status.get("model", {})
    active = [link for link in snapshot.links.values() if link.state == "Active"]
    told = {
        "targetRevision": [fact.weights_fingerprint for fact in snapshot.answers.values()],
        "draftRevision": [link.draft_weights for link in active],
    }
    block = {"name": snapshot.resource.spec.model.name or snapshot.resource.name}
    for name, fingerprints in told.items():
        found = {*fingerprints, *([old[name]] if name in old else [])}
        if len(found) == 1 and _FINGERPRINT.fullmatch(word := found.pop()):
            block[name] = word
    return block | _dtypes(snapshot, old)


def _dtypes(snapshot: Snapshot, old: Object) -> Object:
    """What targets compute with, and why; nodes with different CPUs may choose differently."""
    names = ("targetDtype", "targetDtypeReason")
    answers = [fact for fact in snapshot.answers.values() if fact.dtype]
    if old or not answers:
        return {name: old[name] for name in names if name in old}
    dtypes = ", ".join(sorted({fact.dtype for fact in answers}))
    reasons = "; ".join(sorted({fact.dtype_reason for fact in answers}))
    return {"targetDtype": dtypes, "targetDtypeReason": reasons[:LONGEST_MESSAGE]}


def _target(snapshot: Snapshot) -> Object:
    num_cells, num_ready = snapshot.resource.spec.num_cells, len(snapshot.ready_targets)
    block = {
        "replicas": len(snapshot.targets),
        "readyReplicas": num_ready,
        "updatedReplicas": snapshot.updated(snapshot.targets),
        "summary": f"{num_ready}/{num_cells}",
        "revision": snapshot.revision(Component.TARGET),
    }
    return {name: value for name, value in block.items() if value != ""}


def _draft(snapshot: Snapshot) -> Object:
    wanted, num_active = snapshot.num_drafts_wanted, len(snapshot.active_drafts)
    labels = selector(snapshot.resource, Component.DRAFT)
    block = {
        "replicas": len(snapshot.drafts),
        "readyReplicas": sum(is_ready(pod) for pod in snapshot.drafts),
        "activeReplicas": num_active,
        "pendingReplicas": sum(not is_scheduled(pod) for pod in snapshot.drafts),
        "drainingReplicas": snapshot.num_draining,
        "desiredReplicas": wanted,
        "summary": f"{num_active}/{wanted}",
        "revision": snapshot.revision(Component.DRAFT),
        "selector": ",".join(f"{name}={value}" for name, value in labels.items()),
        **_last_scale(snapshot),
    }
    return {name: value for name, value in block.items() if value != ""}


def _last_scale(snapshot: Snapshot) -> Object:
    decision, old = snapshot.planned.decision, snapshot.observed.status.get("draft", {})
    if decision is not None and snapshot.planned.is_scaling:
        return {
            "lastScaleTime": to_text(snapshot.now),
            "lastScaleReason": str(decision.reason),
        }
    return {name: old[name] for name in ("lastScaleTime", "lastScaleReason") if name in old}


def _links(snapshot: Snapshot) -> list[Object]:
    drafts = {name_of(pod): pod for pod in snapshot.drafts}
    cells = {name_of(pod): cell_of(pod) for pod in snapshot.targets}
    links = []
    for (target, draft), link in snapshot.links.items():
        entry = {
            "target": target,
            "draft": draft,
            "node": drafts.get(draft, {}).get("spec", {}).get("nodeName", ""),
            "cell": cells[target],
            "transport": transport_of(link),
            "roundTripMicroseconds": round(link.round_trip_seconds * 1e6),
            "state": link.state,
            "reason": link.reason[:LONGEST_MESSAGE],
        }
        links.append({name: value for name, value in entry.items() if value != ""})
    return sorted(links, key=lambda entry: (entry["cell"], entry["target"], entry["draft"]))[
        :MOST_LINKS
    ]


def _speculation(snapshot: Snapshot) -> Object:
    """Means over targets by what they run; of idle ones, what they last measured."""
    measured = [fact for fact in snapshot.answers.values() if fact.tokens_per_round > 0]
    if not measured:
        return dict(snapshot.observed.status.get("speculation", {}))
    block = {
        "tokensPerRound": f"{_mean(measured, lambda fact: fact.tokens_per_round):.1f}",
        "hitRate": f"{_mean(measured, lambda fact: fact.hit_rate):.2f}",
    }
    if timed := [fact for fact in measured if fact.efficiency > 0]:
        block["efficiency"] = f"{_mean(timed, lambda fact: fact.efficiency):.2f}"
    return block


def _mean(facts: Iterable[PoolFact], figure: Callable[[PoolFact], float]) -> float:
    pairs = [(figure(fact), fact.eligible_sequences) for fact in facts]
    weights = [weight for _, weight in pairs]
    return fmean([value for value, _ in pairs], weights if sum(weights) > 0 else None)
