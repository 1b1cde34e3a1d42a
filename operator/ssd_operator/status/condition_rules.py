"""The conditions of a resource, each a function of what is there. Pure.

Only what a person or a machine can act on has a reason of its own; the sentence says the rest.
"""

from ssd_operator.api.spec import Object, ScalingMode, Sharing
from ssd_operator.children.names import Component, account, cell_of
from ssd_operator.observe.diagnosis import Diagnosis, Trouble, diagnose, diagnose_absence, worst
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.pod_state import (
    condition_of,
    is_ready,
    is_scheduled,
    is_unschedulable,
    name_of,
)
from ssd_operator.policy.rollout import Stage
from ssd_operator.policy.scaling import Reason
from ssd_operator.policy.snapshot import PROGRESS_EXCEEDED, Snapshot
from ssd_operator.status.conditions import Condition, first_not_true, no, unknown, yes
from ssd_operator.status.speculating import speculation_active

_STUCK = frozenset(Trouble) - {
    *(Trouble.ROLLING_OUT, Trouble.FETCHING_MODEL, Trouble.LOADING),
    *(Trouble.DRAINING, Trouble.SCALING),
}
"""Troubles that do not pass by themselves."""
_SCALERS = {
    ScalingMode.HPA: ("HorizontalPodAutoscaler", "ScalingActive"),
    ScalingMode.KEDA: ("ScaledObject", "Ready"),
}
"""Kind of the object that scales, and its condition that is copied."""


def verdicts(snapshot: Snapshot) -> list[Condition]:
    """All conditions, Ready first."""
    target, spec, owned = target_ready(snapshot), spec_valid(snapshot), resources_owned(snapshot)
    scaling = scaling_active(snapshot)
    return [
        ready(snapshot, target, spec, owned),
        target,
        draft_ready(snapshot),
        speculation_active(snapshot),
        draft_capacity(snapshot),
        *([] if scaling is None else [scaling]),
        progressing(snapshot),
        spec,
        owned,
    ]


def ready(snapshot: Snapshot, target: Condition, spec: Condition, owned: Condition) -> Condition:
    """Whether at least one target serves and clients find it.

    Otherwise the reason is the target's; of a resource for which no target could be made, it is
    what stood in the way.
    """
    num_ready, num_cells = _ready_cells(snapshot), snapshot.resource.spec.num_cells
    if snapshot.reached_targets and snapshot.has_endpoint:
        reason = "Serving" if num_ready == num_cells else "ServingPartly"
        return yes("Ready", reason, f"{num_ready} of {num_cells} targets serve.")
    if snapshot.resource.spec.paused and not snapshot.target_deployments:
        return no("Ready", "Paused", "spec.paused is true: nothing has been made yet.")
    if num_ready:
        name = snapshot.resource.name
        words = "leads to none of them" if snapshot.has_endpoint else "is not there"
        gone = no("Ready", "EndpointMissing", f"Targets serve, but the Service {name} {words}.")
        cause = first_not_true((owned, spec)) or gone
    else:
        causes = (target, spec, owned) if snapshot.target_deployments else (spec, owned, target)
        cause = first_not_true(causes) or target
    return no("Ready", cause.reason, cause.message)


def target_ready(snapshot: Snapshot) -> Condition:
    """Whether every cell has a target that serves."""
    num_cells, num_ready = snapshot.resource.spec.num_cells, _ready_cells(snapshot)
    if num_ready == num_cells:
        return yes("TargetReady", "AllReady", f"{num_ready} of {num_cells} targets are ready.")
    found = [_cell_trouble(snapshot, cell) for cell in range(num_cells)]
    trouble = worst(diagnosis for diagnosis in found if diagnosis is not None)
    assert trouble is not None
    message = f"{num_ready} of {num_cells} targets are ready; {trouble.message}."
    return no("TargetReady", str(trouble.trouble), message)


def draft_ready(snapshot: Snapshot) -> Condition:
    """Whether all drafts wanted are ready, those that are drained aside."""
    wanted, num_ready = snapshot.num_drafts_wanted, len(snapshot.ready_drafts)
    if wanted == 0:
        return yes("DraftReady", "ScaledToZero", "draft.replicas is 0: text is served plain.")
    if num_ready >= wanted:
        return yes("DraftReady", "AllReady", f"{num_ready} of {wanted} drafts are ready.")
    timeout = snapshot.resource.spec.draft.startup_timeout_seconds
    troubles = [diagnose(pod, timeout, snapshot.now) for pod in snapshot.staying_drafts]
    if len(snapshot.staying_drafts) < wanted:
        troubles += [diagnose_absence(made, name_of(made)) for made in snapshot.draft_deployments]
        missing = f"{len(snapshot.staying_drafts)} of {wanted} pods exist"
        troubles.append(Diagnosis(Trouble.SCALING, missing))
    trouble = worst(diagnosis for diagnosis in troubles if diagnosis is not None)
    assert trouble is not None
    message = f"{num_ready} of {wanted} drafts are ready; {trouble.message}."
    return no("DraftReady", str(trouble.trouble), message)


def draft_capacity(snapshot: Snapshot) -> Condition:
    """Whether the scheduler finds a place for each draft whose target has one."""
    placed = {cell_of(pod) for pod in snapshot.targets if is_scheduled(pod)}
    shares_all = snapshot.resource.spec.draft.sharing is Sharing.POOL
    waiting = [
        pod
        for pod in snapshot.staying_drafts
        if is_unschedulable(pod) and (placed if shares_all else cell_of(pod) in placed)
    ]
    if not waiting:
        return yes("DraftCapacity", "Sufficient", "There is room for each draft.")
    words = str(condition_of(waiting[0], "PodScheduled").get("message", "")).rstrip(".")
    lacks_gpus = f"Insufficient {snapshot.resource.spec.draft.gpu_resource}" in words
    return no(
        "DraftCapacity",
        "InsufficientLocalGPUs" if lacks_gpus else "Unschedulable",
        f"{len(waiting)} of {snapshot.num_drafts_wanted} drafts have no node; "
        f"lower draft.replicas or add room: {words}.",
    )


def scaling_active(snapshot: Snapshot) -> Condition | None:
    """Whether someone decides on the number of drafts; None if nobody was asked to."""
    kind = "ScalingActive"
    autoscaling = snapshot.resource.spec.draft.autoscaling
    if autoscaling is None or autoscaling.mode is ScalingMode.NONE:
        return None
    if snapshot.resource.spec.paused:
        return no(kind, "Paused", "spec.paused is true: the number of drafts is kept.")
    if autoscaling.mode is ScalingMode.EXTERNAL:
        return yes(kind, "External", "Another scaler writes draft.replicas.")
    if autoscaling.mode in _SCALERS:
        return _copied(snapshot, autoscaling.mode)
    decision = snapshot.planned.decision
    if decision is None or decision.reason is Reason.NO_SAMPLES:
        return no(
            kind, "NoSamples", "A target has not told its load for 30 s, so the number is kept."
        )
    low, high = autoscaling.min_replicas, autoscaling.max_replicas
    held = "; one finds no node, so no more are asked for"
    suffix = held if decision.reason is Reason.UNSCHEDULABLE else ""
    message = f"The load asks for {decision.replicas} drafts, {low} to {high} allowed{suffix}."
    return yes(kind, "Internal", message)


def progressing(snapshot: Snapshot) -> Condition:
    """What is under way, and whether it gets on."""
    kind, wanted = "Progressing", snapshot.num_drafts_wanted
    if snapshot.resource.spec.paused:
        return no(kind, "Paused", "spec.paused is true: only this status is written.")
    if (found := _tried(snapshot) or _paused(snapshot) or _overdue(snapshot)) is not None:
        return found
    deployments = (*snapshot.target_deployments, *snapshot.draft_deployments)
    pods = (*snapshot.targets, *snapshot.staying_drafts)
    num_updated = snapshot.updated(pods)
    is_rolling = any(_is_rolling(deployment) for deployment in deployments)
    if num_updated < len(pods) or is_rolling or snapshot.is_replacing_targets:
        stuck = _stuck(snapshot)
        return yes(kind, "RollingOut", f"{num_updated} of {len(pods)} pods are up to date{stuck}.")
    if snapshot.num_draining:
        return yes(kind, "Draining", f"{snapshot.num_draining} drafts are on their way out.")
    num_ready, num_cells = _ready_cells(snapshot), snapshot.resource.spec.num_cells
    num_drafts = len(snapshot.staying_drafts)
    # Not by the Deployments: one with maxUnavailable 1 and one replica is Available without a pod.
    if num_drafts != wanted or len(snapshot.ready_drafts) < wanted or num_ready < num_cells:
        drafts = f"{len(snapshot.ready_drafts)} of {wanted} drafts are ready"
        return yes(kind, "Scaling", f"{num_ready} of {num_cells} targets and {drafts}.")
    return yes(kind, "UpToDate", "Everything is as the resource asks.")


def _tried(snapshot: Snapshot) -> Condition | None:
    """What the preflight of a change has to say, unless it has passed."""
    flight = snapshot.planned.preflight
    if flight.stage in (Stage.FAILED, Stage.STUCK):
        message = f"{flight.message}; all pods stay as they are until this is mended."
        return no("Progressing", "PreflightFailed", message)
    if flight.stage is Stage.RUNNING:
        message = f"{flight.message}; the old targets serve until it is done."
        return yes("Progressing", "Preflight", message)
    return None


def _paused(snapshot: Snapshot) -> Condition | None:
    """A Deployment that was paused by hand and that this pass does not resume."""
    for deployment in (*snapshot.target_deployments, *snapshot.draft_deployments):
        name = name_of(deployment)
        is_mended = Ref("Deployment", name) in snapshot.planned.makes
        if deployment.get("spec", {}).get("paused") and not is_mended:
            message = f"Deployment {name} is paused: kubectl rollout resume deployment/{name}."
            return no("Progressing", "Paused", message)
    return None


def _stuck(snapshot: Snapshot) -> str:
    """What keeps a rollout from going on, if a person has to look into it."""
    spec = snapshot.resource.spec
    parts = ((snapshot.targets, spec.target), (snapshot.staying_drafts, spec.draft))
    found = [
        diagnose(pod, part.startup_timeout_seconds, snapshot.now)
        for pods, part in parts
        for pod in pods
    ]
    trouble = worst(each for each in found if each is not None and each.trouble in _STUCK)
    return "" if trouble is None else f"; {trouble.message}"


def _overdue(snapshot: Snapshot) -> Condition | None:
    """The word of a Deployment that does not get on."""
    for deployment in (*snapshot.target_deployments, *snapshot.draft_deployments):
        found = condition_of(deployment, "Progressing")
        if found.get("reason") == PROGRESS_EXCEEDED:
            return no("Progressing", PROGRESS_EXCEEDED, f"{found.get('message', '')}")
    return None


def spec_valid(snapshot: Snapshot) -> Condition:
    """Whether the resource can be carried out, as far as a schema cannot tell."""
    kind = "SpecValid"
    if snapshot.observed.spec_problem is not None:
        return no(kind, *snapshot.observed.spec_problem)
    rejected = {**snapshot.observed.rejected}
    if _is_zero_refused(snapshot):
        del rejected[_scaler(snapshot, "HorizontalPodAutoscaler")]
    if rejected:
        ref = min(rejected)
        message = f"{ref.kind} {ref.name} was refused: {rejected[ref]}"
        has_template = ref.kind in ("Deployment", "Pod")
        return no(kind, "PodTemplateInvalid" if has_template else "ObjectRefused", message)
    apis = snapshot.observed.optional_apis
    if snapshot.observed.unreadable:
        kinds = ", ".join(sorted(snapshot.observed.unreadable))
        message = f"The operator has no right on {kinds}; helm upgrade gives it."
        return no(kind, "OptionalAPIMissing", message)
    if snapshot.resource.spec.observability.pod_monitor and "PodMonitor" not in apis:
        return no(
            kind,
            "OptionalAPIMissing",
            "observability.podMonitor is true, but the cluster does not serve PodMonitor "
            "(monitoring.coreos.com); install it or set the field to false.",
        )
    return yes(kind, "Valid", "The resource can be carried out.")


def resources_owned(snapshot: Snapshot) -> Condition:
    """Whether all names that we need are ours, and what we need may be made."""
    taken = ", ".join(f"{ref.kind} {ref.name}" for ref in sorted(snapshot.observed.foreign))
    forbidden = snapshot.observed.forbidden
    if not taken and forbidden:
        ref = min(forbidden)
        message = f"{ref.kind} {ref.name} cannot be written: {forbidden[ref]}"
        return no("ResourcesOwned", "Forbidden", message)
    if not taken:
        return yes("ResourcesOwned", "Owned", "Every object that we need is ours.")
    return no(
        "ResourcesOwned",
        "NameTaken",
        f"{taken} belongs to somebody else and is left alone; rename or remove it.",
    )


def _ready_cells(snapshot: Snapshot) -> int:
    return len({cell_of(pod) for pod in snapshot.ready_targets})


def _cell_trouble(snapshot: Snapshot, cell: int) -> Diagnosis | None:
    pods, deployment = snapshot.cell_targets(cell), snapshot.target_deployment(cell)
    if any(is_ready(pod) for pod in pods):
        return None
    timeout = snapshot.resource.spec.target.startup_timeout_seconds
    refused = diagnose_absence(deployment, f"cell {cell}")
    trouble = worst(
        found
        for found in (diagnose(pod, timeout, snapshot.now) for pod in pods)
        if found is not None
    )
    absent = Diagnosis(Trouble.LOADING, f"cell {cell} has no pod yet")
    trouble = trouble or refused or absent
    is_usual = trouble.trouble in (Trouble.FETCHING_MODEL, Trouble.LOADING, Trouble.DRAINING)
    if is_usual and deployment is not None and _is_rolling(deployment) and _was_rolled(deployment):
        return Diagnosis(Trouble.ROLLING_OUT, trouble.message)
    return trouble


def _is_rolling(deployment: Object) -> bool:
    """Whether its newest pods have not all been available yet."""
    seen = int(deployment.get("status", {}).get("observedGeneration", 0))
    is_seen = seen >= int(deployment["metadata"].get("generation", 0))
    reason = str(condition_of(deployment, "Progressing").get("reason"))
    return not is_seen or reason != "NewReplicaSetAvailable"


def _was_rolled(deployment: Object) -> bool:
    """Whether its pods are not its first ones."""
    annotations = deployment["metadata"].get("annotations") or {}
    return str(annotations.get("deployment.kubernetes.io/revision", "1")) != "1"


def _copied(snapshot: Snapshot, mode: ScalingMode) -> Condition:
    """The word of the object that scales."""
    kind, told_by = _SCALERS[mode]
    if kind in snapshot.observed.unreadable:
        message = f"The operator has no right on {kind}; helm upgrade gives it."
        return no("ScalingActive", "OptionalAPIMissing", message)
    if mode is ScalingMode.KEDA and kind not in snapshot.observed.optional_apis:
        return no(
            "ScalingActive",
            "KEDANotInstalled",
            "The cluster does not serve ScaledObject (keda.sh); install KEDA or change the mode.",
        )
    ref = _scaler(snapshot, kind)
    if mode is ScalingMode.HPA and _is_zero_refused(snapshot):
        return no("ScalingActive", "ScaleToZeroUnsupported", snapshot.observed.rejected[ref])
    found = condition_of(snapshot.observed.children.get(ref, {}), told_by)
    copies = {"True": yes, "False": no}
    say = copies.get(str(found.get("status")), unknown)
    reason = str(found.get("reason") or "NoSamples")
    return say(
        "ScalingActive",
        reason,
        str(found.get("message") or f"{kind} {ref.name} is not judged yet."),
    )


def _scaler(snapshot: Snapshot, kind: str) -> Ref:
    return Ref(kind, account(snapshot.resource, Component.DRAFT))


def _is_zero_refused(snapshot: Snapshot) -> bool:
    """Whether an HPA that may go to zero was refused: few clusters have that feature."""
    autoscaling = snapshot.resource.spec.draft.autoscaling
    may_be_zero = autoscaling is not None and autoscaling.min_replicas == 0
    return (
        may_be_zero and _scaler(snapshot, "HorizontalPodAutoscaler") in snapshot.observed.rejected
    )
