"""The status of a resource: conditions, and blocks with the numbers. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.api.spec import Object
from ssd_operator.api.status import MOST_DEPLOYMENTS, MOST_LINKS
from ssd_operator.children.objects import Component, child_name, drafts_name, selector
from ssd_operator.children.processes import has_tls, process_of
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import (
    cell_of,
    condition_in,
    is_ready,
    is_scheduled,
    name_of,
    to_text,
)
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.status.condition_rules import TYPES, conditions
from ssd_operator.status.pass_result import LONGEST_MESSAGE, Condition, PassResult, no, unknown

ROUND_TRIP = "roundTripMicroseconds"
_SLOWEST_FIRST = ("TCP", "NET/SOCKET", "NET/", "NCCL", "SHM", "P2P")
"""Beginnings of transports. NCCL means that its path is unknown."""
_LONGEST_WORD = 64
_LONGEST_NAME = 253
_LONGEST_DTYPES = 128
"""Characters that the definition of the resource allows."""
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


def status_of(result: PassResult) -> Object:
    """The whole status; transitions of the present one keep their times."""
    snapshot = result.snapshot
    resource, old, now = snapshot.resource, snapshot.status, to_text(snapshot.now)
    by_type = conditions(result)
    common: Object = {
        "observedGeneration": resource.generation,
        "conditions": merge(old, by_type, resource.generation, now),
        "draft": _draft(result),
        "links": _links(snapshot),
    }
    if resource.is_pool:
        return common | _use(snapshot)
    active = snapshot.active_links.values()
    transports = {link.transport.upper()[:_LONGEST_WORD] for link in active if link.transport}
    # Links are active also while a target decodes without them.
    state = by_type["SpeculationActive"].reason
    if by_type["SpeculationActive"].status == "True" and "NotWorthwhile" in by_type:
        state = by_type["NotWorthwhile"].reason
    status: Object = common | {
        "model": _model(snapshot),
        "target": _target(result),
        "transport": {"effective": min(transports, key=_speed)} if transports else {},
        "speculation": {"state": state} | _speculation(snapshot),
    }
    if result.has_endpoint:
        host = f"{resource.name}.{resource.namespace}.svc"
        process = process_of(resource, Component.TARGET)
        scheme = "https" if has_tls(resource, Component.TARGET, process.api) else "http"
        endpoint = process.endpoint.replace("HOST", host).replace("SCHEME", scheme)
        status["endpoint"] = {process.api: endpoint}
        if Ref("Service", resource.name) in result.plan.held:
            # The Service has the port and the protocol of former targets.
            status["endpoint"] = snapshot.status.get("endpoint")
    return {name: value for name, value in status.items() if value or name == "links"}


def status_of_invalid(old: Object, generation: int, problem: str, now: float) -> Object:
    """The status of a resource that this operator has never been able to read.

    Children of an earlier operator may still serve; without a spec their state is unknown.
    """
    reason, bad = "SpecInvalid", no("SpecInvalid", problem)
    kinds = [condition["type"] for condition in old.get("conditions") or []]
    others = [kind for kind in kinds if kind in TYPES - {"Ready", "SpecValid"}]
    unread = f"The spec cannot be read, so nothing is observed or repaired: {problem}"
    new: dict[str, Condition] = {
        "Ready": unknown(reason, unread) if others else bad,
        **{kind: unknown(reason, unread) for kind in others},
        "SpecValid": bad,
    }
    merged = merge(old, new, generation, to_text(now))
    status = old | {"observedGeneration": generation, "conditions": merged}
    if "speculation" in old:
        status["speculation"] = old["speculation"] | {"state": reason}
    return status


def status_of_deleted(old: Object, generation: int, finalizers: list[str], now: float) -> Object:
    """The status of a resource that is being deleted, while finalizers hold it: no numbers."""
    reason, held = "Deleting", f"The resource waits for its finalizers: {', '.join(finalizers)}"
    unread = f"{held}. Its pods run until then, and are not repaired."
    kinds = {condition["type"] for condition in old.get("conditions") or []} & TYPES
    new = {kind: unknown(reason, unread) for kind in sorted(kinds)} | {"Ready": no(reason, unread)}
    merged = merge(old, new, generation, to_text(now))
    status: Object = {"observedGeneration": generation, "conditions": merged}
    return status | ({"speculation": {"state": reason}} if "speculation" in old else {})


def merge(old: Object, new: Mapping[str, Condition], generation: int, now: str) -> list[Object]:
    """Return the conditions ``new`` as objects; their times change only with their status."""
    return [
        {
            "type": kind,
            "status": condition.status,
            "reason": condition.reason,
            "message": condition.message[:LONGEST_MESSAGE],
            "observedGeneration": generation,
            "lastTransitionTime": before.get("lastTransitionTime", now)
            if (before := condition_in(old, kind)).get("status") == condition.status
            else now,
        }
        for kind, condition in new.items()
    ]


def _model(snapshot: Snapshot) -> Object:
    """The name, and the weights on whose fingerprint all engines agree.

    While a target has not answered, the last status stands for it.
    """
    is_complete = len(snapshot.answers) == len(snapshot.ready_targets)
    old = {} if is_complete else snapshot.status.get("model", {})
    reported = {
        "targetRevision": [answer.weights_fingerprint for answer in snapshot.answers.values()],
        "draftRevision": [link.draft_weights for link in snapshot.active_links.values()],
    }
    block = {"name": snapshot.resource.spec.model.name or snapshot.resource.name}
    for name, fingerprints in reported.items():
        distinct = {*fingerprints, *([old[name]] if name in old else [])}
        if len(distinct) == 1 and _FINGERPRINT.fullmatch(only := distinct.pop()):
            block[name] = only
    return block | _dtypes(snapshot, old)


def _dtypes(snapshot: Snapshot, old: Object) -> Object:
    """Data types of the targets with the reasons; nodes with other CPUs may choose others."""
    answers = [answer for answer in snapshot.answers.values() if answer.dtype]
    if old or not answers:
        names = ("targetDtype", "targetDtypeReason")
        return {name: old[name] for name in names if name in old}
    dtypes = ", ".join(sorted({answer.dtype for answer in answers}))
    reasons = "; ".join(sorted({answer.dtype_reason for answer in answers}))
    return {"targetDtype": dtypes[:_LONGEST_DTYPES], "targetDtypeReason": reasons[:LONGEST_MESSAGE]}


def _target(result: PassResult) -> Object:
    snapshot = result.snapshot
    num_ready = len(snapshot.ready_targets)
    # The revision of the first cell's pods. Pods of other cells differ in the cell only.
    name = child_name(snapshot.resource, Component.TARGET, 0)
    return _without_empty(
        {
            "replicas": len(snapshot.targets),
            "readyReplicas": num_ready,
            "updatedReplicas": result.updated(snapshot.targets),
            "summary": f"{num_ready}/{snapshot.resource.spec.num_cells}",
            "revision": result.plan.revisions.get(name, ""),
        }
    )


def _use(snapshot: Snapshot) -> Object:
    """Who uses a pool, and how much of it."""
    capacity = len(snapshot.ready_drafts) * snapshot.resource.spec.draft.sequences_per_replica
    num_open = sum(link.sessions for link in snapshot.links.values())
    num_ready, num_linked = len(snapshot.ready_targets), len(snapshot.linked_targets)
    return {
        "deployments": list(snapshot.deployments[:MOST_DEPLOYMENTS]),
        "target": {
            "readyReplicas": num_ready,
            "linkedReplicas": num_linked,
            "summary": f"{num_linked}/{num_ready}",
        },
        "sessions": {"open": num_open, "capacity": capacity},
    }


def _draft(result: PassResult) -> Object:
    snapshot = result.snapshot
    wanted, num_active = snapshot.num_drafts_wanted, len(snapshot.active_drafts)
    reference, owner = snapshot.resource.spec.draft.pool_ref, snapshot.pool or snapshot.resource
    labels = selector(owner, Component.DRAFT)
    name = drafts_name(snapshot.resource, 0)
    # Drafts of a pool have no link while no SSDDeployment refers to it.
    num_shown = len(snapshot.ready_drafts) if snapshot.resource.is_pool else num_active
    return _without_empty(
        {
            "pool": "" if reference is None else reference.name,
            "replicas": len(snapshot.drafts),
            "readyReplicas": sum(is_ready(pod) for pod in snapshot.drafts),
            "activeReplicas": num_active,
            "pendingReplicas": sum(not is_scheduled(pod) for pod in snapshot.drafts),
            "drainingReplicas": snapshot.num_draining,
            "desiredReplicas": wanted,
            "summary": f"{num_shown}/{wanted}",
            "revision": result.plan.revisions.get(name, ""),
            "device": owner.spec.draft_device,
            "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
            **_last_scale(result),
        }
    )


def _last_scale(result: PassResult) -> Object:
    decision, old = result.plan.scale, result.snapshot.status.get("draft", {})
    if decision is not None and result.results.is_scaled:
        return {"lastScaleTime": to_text(result.snapshot.now), "lastScaleReason": decision.reason}
    return {name: old[name] for name in ("lastScaleTime", "lastScaleReason") if name in old}


def _links(snapshot: Snapshot) -> list[Object]:
    """The links, as measured: pods on one node do not necessarily use a faster transport.

    Texts of a target that are too long for a status are cut, or its link is left out: an API server
    would refuse the whole status.
    """
    nodes = {name_of(pod): pod.get("spec", {}).get("nodeName", "") for pod in snapshot.drafts}
    cells = {name_of(pod): cell_of(pod) for pod in snapshot.targets}
    old = {(link["target"], link["draft"]): link for link in snapshot.status.get("links") or []}
    entries = [
        _without_empty(
            {
                "target": target,
                "draft": draft,
                "node": nodes.get(draft, ""),
                "cell": cells[target],
                "channel": link.channel.capitalize()[:_LONGEST_WORD] if link.transport else "",
                "transport": link.transport.upper()[:_LONGEST_WORD],
                ROUND_TRIP: _round_trip(old.get((target, draft), {}), link),
                "state": link.state.capitalize(),
                "reason": (link.reason or link.channel_reason)[:LONGEST_MESSAGE],
            }
        )
        for (target, draft), link in snapshot.links.items()
        if 0 < len(draft) <= _LONGEST_NAME
    ]
    entries.sort(key=lambda entry: (entry["cell"], entry["target"], entry["draft"]))
    return entries[:MOST_LINKS]


def _speed(transport: str) -> tuple[int, str]:
    """A key that sorts transports, slowest first."""
    ranks = (rank for rank, prefix in enumerate(_SLOWEST_FIRST) if transport.startswith(prefix))
    return next(ranks, len(_SLOWEST_FIRST)), transport


def _round_trip(before: Object, link: LinkStatus) -> int:
    """The lowest round trip while a link is active; the rest is waiting for a processor.

    It is reported when it is halved: less is noise, also on an idle machine.
    """
    reported, measured = before.get(ROUND_TRIP, 0), round(link.round_trip_seconds * 1e6)
    is_same = before.get("state") == "Active" and link.state == "active"
    return reported if is_same and 0 < reported < 2 * measured else measured


def _speculation(snapshot: Snapshot) -> Object:
    """Means over targets, weighted by their running sequences; without any, the last figures."""
    measured = [answer for answer in snapshot.answers.values() if answer.tokens_per_round > 0]
    if not measured:
        old = snapshot.status.get("speculation", {})
        return {name: value for name, value in old.items() if name != "state"}
    block = {
        "tokensPerRound": f"{_mean(measured, lambda answer: answer.tokens_per_round):.1f}",
        "hitRate": f"{_mean(measured, lambda answer: answer.hit_rate):.2f}",
    }
    if timed := [answer for answer in measured if answer.efficiency > 0]:
        block["efficiency"] = f"{_mean(timed, lambda answer: answer.efficiency):.2f}"
    return block


def _mean(answers: Iterable[PoolStatus], figure: Callable[[PoolStatus], float]) -> float:
    pairs = [(figure(answer), answer.eligible_sequences) for answer in answers]
    weights = [weight for _, weight in pairs]
    return fmean([value for value, _ in pairs], weights if sum(weights) > 0 else None)


def _without_empty(block: Object) -> Object:
    return {name: value for name, value in block.items() if value != ""}
