"""Which targets, drafts and gateways are ready, and whether changes of them proceed. Pure."""

import math
from collections.abc import Iterable, Sequence

from ssd_operator.api.spec import Object, Spec
from ssd_operator.children.manifests import PROGRESS_SECONDS
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
    condition_of,
    is_accepted,
    is_live,
    is_lost,
    is_ready,
    is_rolling,
    is_terminating,
    made_at,
    name_of,
    revision_of,
    to_seconds,
)
from ssd_operator.observe.snapshot import CLOCK_SECONDS, PROGRESS_EXCEEDED, Snapshot
from ssd_operator.policy.rollout import blocking_targets, new_gateways
from ssd_operator.status.pass_result import Condition, PassResult, no, yes

USUAL = frozenset(
    {
        *(PodReason.ROLLING_OUT, PodReason.FETCHING_MODEL, PodReason.LOADING),
        *(PodReason.DRAINING, PodReason.SCALING),
    }
)
"""Reasons that pass without a change by a person."""
_FOUND_SECONDS = 60.0
"""Gateways find a target that is ready within this time: they resolve its name every few seconds,
and their own probes follow."""
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
"""Taint with which Kubernetes ends the pods of a node that is shut down."""


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
        worst(_diagnoses_of(snapshot, Component.TARGET, pods))
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
    diagnoses = _diagnoses_of(snapshot, Component.DRAFT, pods)
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
    diagnoses = _diagnoses_of(snapshot, Component.GATEWAY, snapshot.live_gateways)
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


def _diagnoses_of(
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


def progressing(result: PassResult) -> Condition:
    """Changes are complete, or proceed."""
    snapshot, preflight = result.snapshot, result.preflight
    if snapshot.resource.spec.paused:
        return no("Paused", "spec.paused is true: the operator writes only this status.")
    if preflight.stage in ("Failed", "Stuck"):
        message = f"{preflight.message}; targets that serve stay as they are until this is fixed."
        return no("PreflightFailed", message)
    if preflight.stage == "Running":
        return yes("Preflight", f"{preflight.message}; the old targets serve until it has result.")
    unfinished = _stopped(result) or _under_way(result)
    return unfinished or yes("UpToDate", "All objects are as the resource specifies.")


def overdue_at(status: Object, spec: Spec) -> float:
    """When targets have not all been ready for too long; infinite if all are.

    In seconds since the epoch. Kubernetes evaluates the deadline of a Deployment only until its
    first completion, and not after a return to an earlier template.
    """
    ready = condition_in(status, "TargetReady")
    since = to_seconds(ready.get("lastTransitionTime"))
    if ready.get("status") != "False" or since is None:
        return math.inf
    return since + spec.target.startup_timeout_seconds + PROGRESS_SECONDS


def _overdue(result: PassResult) -> Condition | None:
    """Targets have not all been ready for too long, outside of a rollout; else None."""
    snapshot, ready = result.snapshot, target_ready(result)
    spec = snapshot.resource.spec
    # The rollout that repairs a target has its time too, which Kubernetes measures.
    is_measured = any(map(is_rolling, snapshot.target_deployments))
    is_new = not snapshot.target_deployments
    is_early = snapshot.now < overdue_at(snapshot.status, spec)
    if ready.status == "True" or is_measured or is_new or is_early:
        return None
    seconds = spec.target.startup_timeout_seconds + PROGRESS_SECONDS
    return no(
        PROGRESS_EXCEEDED,
        f"Targets have not all been ready for {seconds} s, which is target.startupTimeoutSeconds "
        f"+ {PROGRESS_SECONDS} s: {ready.message}",
    )


def _stopped(result: PassResult) -> Condition | None:
    """A rollout that does not proceed by itself; None if there is none."""
    rules = (_drafts_refused, _node_lost, _deployment_stopped, _overdue)
    return next((condition for rule in rules if (condition := rule(result))), None)


def _drafts_refused(result: PassResult) -> Condition | None:
    """New drafts of a pool do not fit one of its targets; else None."""
    snapshot, waiting = result.snapshot, result.plan.waiting
    if refused := [target for target, reason in waiting.items() if reason]:
        num_drafts = len(snapshot.staying_drafts)
        return no(
            "DraftsRefused",
            f"{result.updated(snapshot.staying_drafts)} of {num_drafts} drafts are new, and the "
            f"others stay, because {refused[0]} has no link to a new draft: {waiting[refused[0]]}; "
            "change the pool, or the SSDDeployments that refer to it.",
        )
    return None


def _node_lost(result: PassResult) -> Condition | None:
    """A new target waits for a pod that its node does not end; else None."""
    snapshot = result.snapshot
    for cell in range(snapshot.resource.spec.num_cells):
        name = child_name(snapshot.resource, Component.TARGET, cell)
        revision = result.plan.revisions.get(name, "")
        present = [pod for pod in snapshot.cell_targets(cell) if is_live(pod)]
        blocking = blocking_targets(snapshot, cell, revision)
        lost = [pod for pod in blocking if is_lost(pod, snapshot.now)]
        if lost and not any(revision_of(pod) == revision for pod in present):
            node = lost[0]["spec"].get("nodeName", "")
            kept = f"; {name_of(present[0])} stays meanwhile" if present else ""
            return no(
                "NodeLost",
                f"{name_of(lost[0])} is being deleted, but its node {node} does not end it, and "
                f"the new target would wait for it{kept}. If the node is lost: kubectl delete node "
                f"{node}, or kubectl taint node {node} {_OUT_OF_SERVICE}.",
            )
    return None


def _deployment_stopped(result: PassResult) -> Condition | None:
    """A Deployment is paused by hand, or has exceeded its deadline; else None."""
    snapshot, waiting = result.snapshot, result.plan.waiting
    for deployment in _deployments(snapshot):
        name = name_of(deployment)
        is_resumed = Ref("Deployment", name) in result.results.applied
        is_paused = deployment.get("spec", {}).get("paused") and not (is_resumed or waiting)
        if is_paused:
            resume = f"kubectl rollout resume deployment/{name}"
            return no("Paused", f"Deployment {name} is paused: {resume}.")
        if (message := _exceeded(result, deployment)) is not None:
            return no(PROGRESS_EXCEEDED, message)
    return None


def _deployments(snapshot: Snapshot) -> tuple[Object, ...]:
    """The Deployments that exist."""
    engines = snapshot.target_deployments + snapshot.draft_deployments
    return engines + snapshot.gateway_deployments


def _exceeded(result: PassResult, deployment: Object) -> str | None:
    """How a Deployment has exceeded its deadline; None if it has not.

    A gateway that waits for a target is no failure. Once it has started, it may need a new target,
    which loads.
    """
    snapshot, needs_new = result.snapshot, result.plan.gateway != "Started"
    progress = condition_of(deployment, "Progressing")
    if progress.get("reason") != PROGRESS_EXCEEDED:
        return None
    message = str(progress.get("message", ""))
    if deployment not in snapshot.gateway_deployments:
        return message
    diagnoses = _diagnoses_of(snapshot, Component.GATEWAY, snapshot.live_gateways)
    diagnosis = worst([*diagnoses, diagnose_absence(deployment, name_of(deployment))])
    is_usual = diagnosis is None or diagnosis.reason in USUAL
    serving = [pod for pod in snapshot.ready_targets if _has_served(pod, snapshot.now)]
    if is_usual and not (result.updated(serving) if needs_new else serving):
        return None
    return message if diagnosis is None else f"{message.rstrip('.')}; {diagnosis.message}."


def _has_served(target: Object, now: float) -> bool:
    """Whether a ready target has been ready for long enough that gateways have found it."""
    since = to_seconds(condition_of(target, "Ready").get("lastTransitionTime"))
    return since is None or now - since >= _FOUND_SECONDS


def _under_way(result: PassResult) -> Condition | None:
    """A rollout, a drain or a scale-up; None if everything is up to date."""
    snapshot, num_cells = result.snapshot, result.snapshot.resource.spec.num_cells
    is_pool = snapshot.resource.is_pool
    engines = snapshot.staying_drafts if is_pool else (*snapshot.targets, *snapshot.staying_drafts)
    pods = (*engines, *snapshot.live_gateways)
    cells = map(snapshot.cell_targets, range(num_cells))
    leaving = [pod for targets in cells for pod in targets if is_terminating(pod)]
    num_updated = result.updated(pods)
    has_old = num_updated < len(pods) or result.updated(leaving) < len(leaving)
    num_ready = num_ready_cells(snapshot)
    # A Deployment that returns to an earlier template counts as complete without a ready pod.
    was_rolling = condition_in(snapshot.status, "Progressing").get("reason") == "RollingOut"
    is_starting = was_rolling and num_ready < num_cells
    if has_old or is_starting or any(map(is_rolling, _deployments(snapshot))):
        diagnoses = _diagnoses_of(snapshot, Component.TARGET, snapshot.targets)
        diagnoses += _diagnoses_of(snapshot, Component.DRAFT, snapshot.staying_drafts)
        diagnoses += _diagnoses_of(snapshot, Component.GATEWAY, snapshot.live_gateways)
        cause = worst(
            diagnosis for diagnosis in diagnoses if diagnosis and diagnosis.reason not in USUAL
        )
        suffix = _wait(result) or ("" if cause is None else f"; {cause.message}")
        num_new_ready = result.updated([pod for pod in pods if is_ready(pod)])
        updated = f"{num_updated} of {len(pods)} pods are up to date"
        return yes("RollingOut", f"{updated}, {num_new_ready} of them ready{suffix}.")
    if snapshot.num_draining:
        return yes("Draining", f"{snapshot.num_draining} drafts are drained or deleted.")
    wanted, num_drafts = snapshot.num_drafts_wanted, len(snapshot.ready_drafts)
    # Pods are counted, because a Deployment with maxUnavailable 1 and one replica is Available
    # without a ready pod.
    is_scaling = len(snapshot.staying_drafts) != wanted and pool_missing(snapshot) is None
    if is_scaling or num_drafts < wanted or num_ready < num_cells:
        targets = "" if is_pool else f"{num_ready} of {num_cells} targets and "
        return yes("Scaling", f"{targets}{num_drafts} of {wanted} drafts are ready.")
    return None


def _wait(result: PassResult) -> str:
    """What the next step of a rollout waits for, as the end of a message; empty for nothing."""
    snapshot, gateway = result.snapshot, result.plan.gateway
    if waiting := [*result.plan.waiting]:
        return f"; the next draft waits until {waiting[0]} has a link to a new one"
    if gateway == "None":
        return ""
    name = child_name(snapshot.resource, Component.GATEWAY)
    pods = new_gateways(snapshot, result.plan.revisions[name])
    diagnosis = (
        worst(_diagnoses_of(snapshot, Component.GATEWAY, pods))
        or diagnose_absence(snapshot.children.get(Ref("Deployment", name)), name)
        or Diagnosis(PodReason.LOADING, f"{name} has no new pod yet")
    )
    state = "has started" if gateway == "Started" else "is ready"
    return f"; the next target waits until a new gateway {state}: {diagnosis.message}"
