"""Which targets and drafts may be replaced now, and the preflight before that. Pure.

A cell that serves waits until its preflight has passed and all other cells serve, so a bad revision
stops before or after the first cell, and the operator never takes two cells down. A cell that does
not serve rolls without a preflight, which is how a bad revision is repaired. It waits in two cases.
If the preflight of the new revision has failed, the present target may recover. If it still runs
while other cells serve, the present target may be loading.

Drafts roll after their target: a setting that both sides must share ends their link on whichever
side it changes first. A cell's drafts roll once its old target is gone, while the new one loads.

A cell that serves also waits for a new gateway. Gateways roll by their Deployment: a new one starts
beside the old ones, and an old one ends once a new one is ready, which is once a target answers it.

A cell also waits while one of its former targets is being deleted beside the present one, as on a
lost node: Kubernetes would create the new target only after the former one has ended.

A pod template decides, not the revision in its label: a manual edit of a template leaves the label,
and its repair replaces the pod as any rollout does.

The preflight is a pod on the target's node, which runs the new image with the new settings and
``--print-config``. This checks that the image can be pulled and that the process accepts its
settings; nothing is loaded. All state is the pod: its name contains the revision, its phase is the
result.

Drafts of a pool roll one after the other. Once the first new one is ready, the rollout stops until
each target that an old draft serves has a link to a new one: the next step could take its last
link. A target that has had no link for a minute is not waited for, unless a new draft refuses it.
Meanwhile both revisions serve, so targets may change one after the other. The number of drafts
stays: Kubernetes takes the pods of a Deployment that is stopped from its oldest revision.

*Decision*: a target that is loaded counts as serving until it has been unready for a minute.
*Because* two late answers to probes make a busy target unready. While one cell loads, the other one
has all requests, and both would be down. *Not chosen*: to wait for a crash, because a target that
hangs would never be replaced. *Revisit when* busy targets are unready for longer.

*Decision*: one preflight a revision, on the node of the first cell that rolls. *Because* cells
differ in nothing that could fail but the node. *Not chosen*: one a node, which would also pull the
image to each. *Revisit when* pulls delay the later cells of a rollout.

*Decision*: targets that serve wait until a new gateway has started, and the last one of several
cells also waits until a new gateway is ready. *Because* a change of ``security`` makes new targets
refuse old gateways. Without a wait, all targets were replaced although no new gateway could start,
as its Secret did not exist, and OpenAI's API was down with Ready True. *Not chosen*: to wait until
a new gateway is ready also with the first cell, because a gateway with TLS never finds an old
target ready; to wait only if ``security`` changes, because a pod template does not show what the
other side accepts. *Revisit when* gateways start much later than targets.
"""

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from ssd_operator.api.spec import Object
from ssd_operator.children.objects import (
    CELL_LABEL,
    HASH_ANNOTATION,
    Workload,
    drafts_name,
)
from ssd_operator.children.pods import PREFLIGHT_CONTAINER, affinity_to, preflight_spec
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.diagnosis import KILLED, PodReason, diagnose
from ssd_operator.observe.diff import matches
from ssd_operator.observe.pod_state import (
    annotations_of,
    cell_of,
    has_ended,
    has_started,
    is_live,
    is_ready,
    is_terminating,
    name_of,
    revision_of,
    to_seconds,
    unready_deadline,
)
from ssd_operator.observe.snapshot import UP, Snapshot
from ssd_operator.policy.apply_failures import ApplyFailure

RETRY_SECONDS = 60.0
"""Time until a preflight is repeated that was killed, or that the cluster ended."""
UNLINKED_SECONDS = 60.0
"""A target that has not connected to any draft for longer does not stop the rollout of a pool. One
that waits for a new draft for longer is reported."""
_LIMIT_RANGE = re.compile(r"per (Container|Pod)\b")
"""In the message of the API server, if a LimitRange forbids a pod."""
_RUNNING = frozenset({PodReason.LOADING, PodReason.DRAINING})


Stage = Literal["None", "Running", "Passed", "Stuck", "Failed"]
"""State of the preflight of a revision. None: no target that serves is to be replaced. Stuck: it
does not run, because the pod is refused or for reasons outside of the revision. Failed: the
revision cannot run."""
AwaitedGateway = Literal["None", "Started", "Ready"]
"""The state of a new gateway that outdated targets wait for; None: they wait for no gateway."""


def outdated_targets(wanted: Sequence[Object], snapshot: Snapshot) -> list[Object]:
    """Return the wanted target Deployments whose apply would replace pods."""
    return [
        target
        for target in wanted
        if (live := snapshot.children.get(ref_of(target))) is not None
        and not matches(live["spec"]["template"], target["spec"]["template"])
    ]


def held_targets(
    wanted: Sequence[Object],
    outdated: Sequence[Object],
    snapshot: Snapshot,
    stage: Stage,
    gateway: AwaitedGateway = "None",
) -> frozenset[Ref]:
    """Target Deployments that stay as they are in this pass."""
    down = {ref_of(target) for target in wanted if not _is_up(target, snapshot)}
    is_served = any(serving_pod(target, snapshot) is not None for target in wanted)
    held = set()
    for target in outdated:
        ref = ref_of(target)
        if _is_blocked(target, snapshot):
            held.add(ref)
            continue
        if kept_pod(target, snapshot) is None:
            is_held = stage == "Failed" or (stage == "Running" and is_served)
        else:
            is_held = bool(down - {ref}) or stage != "Passed" or gateway != "None"
            down.add(ref)  # a cell that rolls now is down from now on
        if is_held:
            held.add(ref)
    return frozenset(held)


def blocking_targets(snapshot: Snapshot, cell: int, revision: str) -> list[Object]:
    """Targets of a cell that are being deleted, and for which a new one of this revision waits.

    With the strategy Recreate, Kubernetes creates no pod before the pods of other templates have
    ended.
    """
    return [
        pod
        for pod in snapshot.cell_targets(cell)
        if is_terminating(pod) and not has_ended(pod) and revision_of(pod) != revision
    ]


def _is_blocked(wanted: Object, snapshot: Snapshot) -> bool:
    """Whether an apply would only delete the present target of a cell, and create none now.

    A pod on a lost node is being deleted until a person removes the node.
    """
    cell = cell_of(wanted)
    has_target = any(map(is_live, snapshot.cell_targets(cell)))
    return has_target and bool(blocking_targets(snapshot, cell, revision_of(wanted)))


def held_drafts(
    wanted: Sequence[Object],
    targets: Sequence[Object],
    snapshot: Snapshot,
    targets_held: Set[Ref],
    stage: Stage,
) -> frozenset[Ref]:
    """Draft Deployments whose template stays as it is in this pass.

    The drafts of a Pool belong to all cells. They roll once half of the targets have been replaced.
    """
    held = set()
    for deployment in wanted:
        is_pool = CELL_LABEL not in deployment["metadata"]["labels"]
        own = [target for target in targets if is_pool or cell_of(target) == cell_of(deployment)]
        waiting = [target for target in own if ref_of(target) in targets_held]
        num_old = sum(target in waiting or _has_old(target, snapshot) for target in own)
        if (waiting and stage != "Passed") or 2 * num_old > len(own):
            held.add(ref_of(deployment))
    return frozenset(held)


def new_gateways(snapshot: Snapshot, revision: str) -> list[Object]:
    """Live gateways of this revision."""
    return [pod for pod in snapshot.live_gateways if revision_of(pod) == revision]


def awaited_gateway(
    gateways: Object | None,
    targets: Sequence[Object],
    outdated: Sequence[Object],
    snapshot: Snapshot,
) -> AwaitedGateway:
    """Return what the ``outdated`` ones of the wanted ``targets`` wait for.

    ``gateways`` is their wanted Deployment. Without a gateway of another revision, no API is lost.
    """
    new = [] if gateways is None else new_gateways(snapshot, revision_of(gateways))
    has_old = len(new) < len(snapshot.live_gateways)
    if gateways is None or not has_old or not outdated:
        return "None"
    if not any(map(has_started, new)):
        return "Started"
    is_last = len(outdated) == 1 < len(targets)
    return "Ready" if is_last and not any(map(is_ready, new)) else "None"


def unlinked_targets(snapshot: Snapshot, before: Mapping[str, float]) -> dict[str, float]:
    """Since when targets of a pool have had no link that is up, by target."""
    is_pool = snapshot.resource.is_pool
    names = snapshot.answers.keys() - snapshot.linked_targets if is_pool else ()
    return {name: before.get(name, snapshot.now) for name in names}


def waiting_targets(
    snapshot: Snapshot, unlinked: Mapping[str, float], before: Mapping[str, float]
) -> dict[str, str]:
    """Targets of a pool that could lose their last link by the next step of a rollout.

    Each has the reason for which it has no link to a new draft: a new draft refuses it, or it has
    waited for long, by the times in ``before``, and cannot connect to one. The reason is empty
    while this may still change. A link to an old draft counts unless it is refused: it can be lost
    for a moment on a busy machine. A target in ``unlinked`` for long, which no new draft refuses,
    cannot connect to any draft.
    """
    live = snapshot.children.get(Ref("Deployment", drafts_name(snapshot.resource, 0)))
    if live is None or not snapshot.resource.is_pool:
        return {}
    drafts = snapshot.staying_drafts
    newest = [pod for pod in drafts if revision_of(pod) == revision_of(live)]
    if not any(map(is_ready, newest)):
        return {}
    new = set(map(name_of, newest))
    old = {*map(name_of, drafts)} - new
    of_old, of_new = set[str](), set[str]()
    refused, failed = dict[str, str](), dict[str, str]()
    for (target, draft), link in sorted(snapshot.links.items()):
        if draft in old and link.state != "refused":
            of_old.add(target)
        elif draft in new and link.state in UP:
            of_new.add(target)
        elif draft in new and link.state == "refused":
            refused[target] = link.reason
        elif draft in new and link.state == "lost":
            failed[target] = link.reason
    waiting = of_old - of_new - (_long_in(unlinked, snapshot.now) - refused.keys())
    reasons = {target: failed.get(target, "") for target in _long_in(before, snapshot.now)}
    return {target: (reasons | refused).get(target, "") for target in sorted(waiting)}


def _long_in(since: Mapping[str, float], now: float) -> set[str]:
    """Targets that have been in a state for ``UNLINKED_SECONDS``."""
    return {name for name, begin in since.items() if now - begin >= UNLINKED_SECONDS}


def stopped(wanted: Object) -> Object:
    """The wanted Deployment, which replaces no pod."""
    return wanted | {"spec": wanted["spec"] | {"paused": True}}


def with_template_of(live: Object, wanted: Object) -> Object:
    """The wanted Deployment with the live template and its hash."""
    hashed = {key: value for key, value in annotations_of(live).items() if key == HASH_ANNOTATION}
    annotations = wanted["metadata"]["annotations"] | hashed
    return wanted | {
        "metadata": wanted["metadata"] | {"annotations": annotations},
        "spec": wanted["spec"] | {"template": live["spec"]["template"]},
    }


def serving_pod(wanted: Object, snapshot: Snapshot) -> Object | None:
    """A ready target pod of a live Deployment's revision; None without one."""
    return next(filter(is_ready, _present_pods(wanted, snapshot)), None)


def kept_pod(wanted: Object, snapshot: Snapshot) -> Object | None:
    """The target pod of a cell that serves, or is unready for a moment; None without one."""
    pods = _present_pods(wanted, snapshot)
    busy = (pod for pod in pods if unready_deadline(pod, snapshot.now) is not None)
    return serving_pod(wanted, snapshot) or next(busy, None)


def _present_pods(wanted: Object, snapshot: Snapshot) -> list[Object]:
    """Target pods of a live Deployment's revision."""
    live = snapshot.children.get(ref_of(wanted))
    return [
        pod
        for pod in snapshot.cell_targets(cell_of(wanted))
        if live is not None and revision_of(pod) == revision_of(live)
    ]


def _has_old(wanted: Object, snapshot: Snapshot) -> bool:
    """Whether a target of another revision still serves or finishes its streams."""
    return any(
        revision_of(pod) != revision_of(wanted) and (is_terminating(pod) or is_ready(pod))
        for pod in snapshot.cell_targets(cell_of(wanted))
    )


def _is_up(wanted: Object, snapshot: Snapshot) -> bool:
    """Whether a cell serves and its Deployment's controller has seen its last change.

    A ready pod alone may be one that the controller is about to delete. While a person has paused
    the Deployment, its controller deletes none.
    """
    if serving_pod(wanted, snapshot) is None:
        return False
    live = snapshot.children[ref_of(wanted)]
    status = live.get("status", {})
    is_seen = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    return is_seen and bool(live["spec"].get("paused") or status.get("updatedReplicas", 0))


@dataclass(frozen=True, slots=True)
class Preflight:
    """Result of the test of the wanted revision so far, and the pod that tests it."""

    stage: Stage = "None"
    message: str = ""
    """What was found, without a full stop."""
    pod: Object | None = None
    """The wanted pod, live or still to be created. All other preflight pods are deleted."""
    again_after: float = math.inf
    """Seconds until time alone changes this."""


def preflight_state(
    preflights: Workload,
    wanted: Sequence[Object],
    outdated: Sequence[Object],
    snapshot: Snapshot,
    failures: Mapping[Ref, ApplyFailure],
) -> Preflight:
    """Return the state of the preflight of a change, given the failures of the last pass."""
    if not outdated:
        return Preflight()
    # Revisions of cells differ by the cell's number only: the first one's stands for all.
    name = f"{preflights.name}-{revision_of(wanted[0])}"
    live = snapshot.children.get(ref := Ref("Pod", name))
    nodes = [
        (target, pod["spec"]["nodeName"])
        for target in outdated
        if (pod := kept_pod(target, snapshot)) is not None
    ]
    if live is not None:
        preflight = _result(live, snapshot.now)
        places = [{"affinity": affinity_to(node)} for _, node in nodes]
        is_elsewhere = not any(matches(live["spec"], place) for place in places)
        if preflight.stage != "Passed" and places and is_elsewhere:
            # The node of the preflight may be gone, and the pod would never run.
            return Preflight("Running", f"{name} is created again on the target's node")
        return preflight
    for target, node in nodes:
        pod = _new_preflight(preflights, name, target, node, snapshot, failures.get(ref))
        if ref in failures and failures[ref].cause != "Contested":
            return Preflight("Stuck", failures[ref].message.rstrip("."), pod)
        return Preflight("Running", f"{name} is created", pod)
    return Preflight()


def _new_preflight(
    preflights: Workload,
    name: str,
    target: Object,
    node: str,
    snapshot: Snapshot,
    failure: ApplyFailure | None,
) -> Object:
    """The pod of a preflight. It reserves little, unless a LimitRange has forbidden that.

    The pod that requests its limits is kept until its own refusal is over.
    """

    def pod(*, reserves_little: bool) -> Object:
        spec = preflight_spec(target, node, reserves_little=reserves_little)
        made = preflights.make("Pod", name, spec=spec)
        made["metadata"]["annotations"] |= annotations_of(target["spec"]["template"])
        return made

    little = pod(reserves_little=True)
    if failure is None:
        return little
    if failure.version[0] == annotations_of(little)[HASH_ANNOTATION]:
        return pod(reserves_little=False) if _LIMIT_RANGE.search(failure.message) else little
    large = pod(reserves_little=False)
    was_large = failure.version[0] == annotations_of(large)[HASH_ANNOTATION]
    return large if was_large and snapshot.now < failure.retry_at else little


def _termination(pod: Object) -> Object:
    """How the container has ended; one that a mesh has added may run on. Empty before the end."""
    terminations = (
        (container.get("state") or {}).get("terminated") or {}
        for container in pod.get("status", {}).get("containerStatuses") or ()
        if container.get("name") == PREFLIGHT_CONTAINER
    )
    return next(terminations, {})


def _result(pod: Object, now: float) -> Preflight:
    status, name, exit_code = pod.get("status", {}), name_of(pod), _termination(pod).get("exitCode")
    if status.get("phase") == "Succeeded" or exit_code == 0:
        return Preflight("Passed", pod=pod)
    if status.get("reason") and not is_terminating(pod):
        # Evicted, out of time or its node shut down: the result is unknown.
        message = f"{name} was ended: {status['reason']}: {status.get('message', '')}"
        return _without_result(pod, message.rstrip(" :."), now)
    diagnosis = diagnose(pod, int(pod["spec"]["activeDeadlineSeconds"]), now)
    if diagnosis is None or diagnosis.reason in _RUNNING:
        return Preflight("Running", f"{name} runs" if diagnosis is None else diagnosis.message, pod)
    # A container that exceeds its own memory does so again.
    if exit_code in KILLED and _termination(pod).get("reason") != "OOMKilled":
        return _without_result(pod, diagnosis.message, now)
    is_stuck = diagnosis.reason is PodReason.UNSCHEDULABLE
    return Preflight("Stuck" if is_stuck else "Failed", diagnosis.message.rstrip("."), pod)


def _without_result(pod: Object, message: str, now: float) -> Preflight:
    """The state of a preflight that has ended without a result and is repeated after a while."""
    made_at = to_seconds(pod["metadata"].get("creationTimestamp")) or now
    ended_at = to_seconds(_termination(pod).get("finishedAt")) or made_at
    # The clock of the node may be behind or ahead.
    since = min(max(ended_at, made_at), now)
    if now - since >= RETRY_SECONDS:
        return Preflight("Stuck", message)
    return Preflight("Stuck", message, pod, since + RETRY_SECONDS - now)
