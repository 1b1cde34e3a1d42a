"""Which targets, drafts and gateways are ready, and why others are not. Pure."""

import math
from collections.abc import Iterable, Sequence

from ssd_operator.api.spec import Object
from ssd_operator.children.objects import Component, child_name
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.diagnosis import (
    Diagnosis,
    PodReason,
    diagnose,
    diagnose_absence,
    diagnose_failed,
    worst,
)
from ssd_operator.observe.pod_state import (
    annotations_of,
    cell_of,
    condition_in,
    is_accepted,
    is_live,
    is_ready,
    is_rolling,
    made_at,
    name_of,
    to_seconds,
)
from ssd_operator.observe.snapshot import CLOCK_SECONDS, Snapshot
from ssd_operator.status.pass_result import Condition, PassResult, no, yes

USUAL = frozenset(
    {
        *(PodReason.ROLLING_OUT, PodReason.FETCHING_MODEL, PodReason.LOADING),
        *(PodReason.DRAINING, PodReason.SCALING),
    }
)
"""Reasons that pass without a change by a person."""


def target_ready(result: PassResult) -> Condition:
    """Every cell has a target that serves."""
    snapshot = result.snapshot
    num_cells, num_ready = snapshot.resource.spec.num_cells, num_ready_cells(snapshot)
    summary = f"{num_ready} of {num_cells} targets are ready"
    diagnosis = worst(_diagnose_cell(snapshot, cell) for cell in range(num_cells))
    return _not_ready(summary, diagnosis) if diagnosis else yes("AllReady", f"{summary}.")


def _diagnose_cell(snapshot: Snapshot, cell: int) -> Diagnosis | None:
    """Why a cell has no ready target; None if it has one."""
    pods, name = snapshot.cell_targets(cell), child_name(snapshot.resource, Component.TARGET, cell)
    deployment = snapshot.children.get(Ref("Deployment", name))
    if any(map(is_ready, pods)):
        return None
    diagnosis = (
        worst(diagnoses_of(snapshot, Component.TARGET, pods))
        or diagnose_absence(deployment, f"cell {cell}")
        or Diagnosis(PodReason.LOADING, f"cell {cell} has no pod yet")
    )
    if diagnosis.reason in USUAL and not any(is_live(pod) and is_accepted(pod) for pod in pods):
        ended = [pod for pod in snapshot.ended(Component.TARGET) if cell_of(pod) == cell]
        diagnosis = _failure(snapshot, ended, "TargetReady", f"cell {cell}") or diagnosis
    if deployment is None or diagnosis.reason not in USUAL or not is_rolling(deployment):
        return diagnosis
    are_first = annotations_of(deployment).get("deployment.kubernetes.io/revision", "1") == "1"
    return diagnosis if are_first else Diagnosis(PodReason.ROLLING_OUT, diagnosis.message)


def _failure(
    snapshot: Snapshot, ended: Iterable[Object], condition: str, what: str
) -> Diagnosis | None:
    """Why the newest rejected pod has failed, if it is of the present outage of a condition.

    Pods that have failed stay for days. One that has run was evicted, and is replaced.
    """
    changed_at = to_seconds(condition_in(snapshot.status, condition).get("lastTransitionTime"))
    newest = max((pod for pod in ended if not is_accepted(pod)), key=made_at, default=None)
    if newest is None or made_at(newest) < (changed_at or 0.0) - CLOCK_SECONDS:
        return None
    return diagnose_failed(newest, what)


def draft_ready(result: PassResult) -> Condition:
    """As many drafts as wanted are ready, without those that are drained."""
    snapshot, pods = result.snapshot, result.snapshot.staying_drafts
    wanted, num_ready = snapshot.num_drafts_wanted, len(snapshot.ready_drafts)
    if missing := pool_missing(snapshot):
        return missing
    if wanted == 0:
        return yes(
            "ScaledToZero",
            f"{replicas_field(snapshot)} is 0: targets serve plain autoregressive text.",
        )
    summary = f"{num_ready} of {wanted} drafts are ready"
    if num_ready >= wanted:
        return yes("AllReady", f"{summary}.")
    diagnoses = diagnoses_of(snapshot, Component.DRAFT, pods)
    if len(pods) < wanted:
        diagnoses += [
            diagnose_absence(deployment, name_of(deployment))
            for deployment in snapshot.draft_deployments
        ]
        number = f"{len(pods)} of {wanted} pods exist"
        if result.plan.waiting:
            number += ", and their number stays while the rollout of the drafts is stopped"
        diagnoses.append(Diagnosis(PodReason.SCALING, number))
    diagnosis = worst(diagnoses)
    assert diagnosis is not None
    are_starting = any(is_accepted(pod) and not is_ready(pod) for pod in pods)
    if diagnosis.reason in USUAL and not are_starting:
        ended = snapshot.ended(Component.DRAFT)
        diagnosis = _failure(snapshot, ended, "DraftReady", "the drafts") or diagnosis
    return _not_ready(summary, diagnosis)


def pool_missing(snapshot: Snapshot) -> Condition | None:
    """The resource refers to a pool that does not exist or cannot be read; else None."""
    reference = snapshot.resource.spec.draft.pool_ref
    if reference is None or snapshot.pool is not None:
        return None
    return no(
        "PoolMissing",
        f"There is no valid SSDDraftPool {reference.name} in namespace "
        f"{snapshot.resource.namespace}, or it is being deleted: create it, or change "
        "draft.poolRef; targets that have no link serve without drafts meanwhile.",
    )


def replicas_field(snapshot: Snapshot) -> str:
    """The field that has the number of drafts."""
    pool = snapshot.resource if snapshot.resource.is_pool else snapshot.pool
    return "draft.replicas" if pool is None else f"replicas of SSDDraftPool {pool.name}"


def gateway_ready(result: PassResult) -> Condition | None:
    """As many gateways as wanted are available; none if they are not enabled."""
    snapshot, gateway = result.snapshot, result.snapshot.resource.spec.gateway
    name = child_name(snapshot.resource, Component.GATEWAY)
    if not gateway.enabled:
        return None
    deployment = snapshot.children.get(Ref("Deployment", name))
    num_ready = int((deployment or {}).get("status", {}).get("availableReplicas") or 0)
    summary = f"{num_ready} of {gateway.replicas} gateways are ready"
    if lost := snapshot.gateway_services_lost:
        return no("NameTaken", f"{summary}; {taken_names(snapshot, lost)}.")
    if num_ready >= gateway.replicas:
        return yes("AllReady", f"{summary}.")
    diagnoses = diagnoses_of(snapshot, Component.GATEWAY, snapshot.live_gateways)
    diagnosis = worst([*diagnoses, diagnose_absence(deployment, name)])
    if diagnosis is not None and diagnosis.reason is not PodReason.LOADING:
        return _not_ready(summary, diagnosis)
    what = f"see the pods of {name}" if diagnosis is None else diagnosis.message
    others = f"the others start, or wait for a ready target: {what}"
    return no(PodReason.LOADING, f"{summary}; {others}.")


def _not_ready(summary: str, diagnosis: Diagnosis) -> Condition:
    return no(diagnosis.reason, f"{summary}; {diagnosis.message}.")


def taken_names(snapshot: Snapshot, refs: Iterable[Ref]) -> str:
    """Names that are not this resource's, each with its owner."""
    names = (f"{ref.kind} {ref.name} belongs to {snapshot.foreign[ref]}" for ref in sorted(refs))
    return ", ".join(names)


def num_ready_cells(snapshot: Snapshot) -> int:
    """Number of cells with a target that serves."""
    return len({cell_of(pod) for pod in snapshot.ready_targets})


def diagnoses_of(
    snapshot: Snapshot, component: Component, pods: Sequence[Object]
) -> list[Diagnosis | None]:
    """Why these pods of a component are not ready; None for each that is."""
    drafts = (snapshot.pool or snapshot.resource).spec.draft
    seconds: dict[Component, float] = {
        Component.TARGET: snapshot.resource.spec.target.startup_timeout_seconds,
        Component.DRAFT: drafts.startup_timeout_seconds,
    }
    # A gateway has no timeout of its own: it waits for a target.
    return [diagnose(pod, seconds.get(component, math.inf), snapshot.now) for pod in pods]
