"""Whether the changes of a resource are complete, or proceed. Pure."""

import math

from ssd_operator.api.spec import Object, Spec
from ssd_operator.children.manifests import PROGRESS_SECONDS
from ssd_operator.children.objects import Component, child_name
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.diagnosis import Diagnosis, PodReason, diagnose_absence, worst
from ssd_operator.observe.pod_state import (
    condition_in,
    condition_of,
    is_live,
    is_lost,
    is_ready,
    is_rolling,
    is_terminating,
    name_of,
    revision_of,
    to_seconds,
)
from ssd_operator.observe.snapshot import PROGRESS_EXCEEDED, Snapshot
from ssd_operator.policy.rollout import blocking_targets, new_gateways
from ssd_operator.status.pass_result import Condition, PassResult, no, yes
from ssd_operator.status.readiness import (
    USUAL,
    diagnoses_of,
    num_ready_cells,
    pool_missing,
    target_ready,
)

_FOUND_SECONDS = 60.0
"""Gateways find a target that is ready within this time: they resolve its name every few seconds,
and their own probes follow."""
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
"""Taint with which Kubernetes ends the pods of a node that is shut down."""


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
    diagnoses = diagnoses_of(snapshot, Component.GATEWAY, snapshot.live_gateways)
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
        diagnoses = diagnoses_of(snapshot, Component.TARGET, snapshot.targets)
        diagnoses += diagnoses_of(snapshot, Component.DRAFT, snapshot.staying_drafts)
        diagnoses += diagnoses_of(snapshot, Component.GATEWAY, snapshot.live_gateways)
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
        worst(diagnoses_of(snapshot, Component.GATEWAY, pods))
        or diagnose_absence(snapshot.children.get(Ref("Deployment", name)), name)
        or Diagnosis(PodReason.LOADING, f"{name} has no new pod yet")
    )
    state = "has started" if gateway == "Started" else "is ready"
    return f"; the next target waits until a new gateway {state}: {diagnosis.message}"
