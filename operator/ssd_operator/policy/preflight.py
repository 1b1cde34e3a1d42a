"""A test of a new revision before it replaces a target that serves. Pure.

A pod on the target's node runs the new image with the new settings and ``--print-config``. This
checks that the image can be pulled and that the process accepts its settings; nothing is loaded.
All state is the pod: its name contains the revision, its phase is the result.

*Decision*: one preflight a revision, on the node of the first cell that rolls. *Because* cells
differ in nothing that could fail but the node. *Not chosen*: one a node, which would also pull the
image to each. *Revisit when* pulls delay the later cells of a rollout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_operator.api.spec import Object
from ssd_operator.children.names import HASH_ANNOTATION, PREFLIGHT, preflight_pod, revision_of
from ssd_operator.children.objects import ChildFactory
from ssd_operator.children.pods import preflight_spec
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.diagnosis import PodReason, diagnose
from ssd_operator.observe.pod_state import is_terminating, name_of, to_seconds
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.rollout import Stage, serving_pod

RETRY_SECONDS = 60.0
"""Until a preflight that the cluster ended is repeated."""
_RUNNING = frozenset({PodReason.LOADING, PodReason.DRAINING})


@dataclass(frozen=True, slots=True)
class Preflight:
    """Result of the test of the wanted revision so far, and the pod that tests it."""

    stage: Stage = Stage.NONE
    message: str = ""
    """What was found, without a full stop."""
    pod: Object | None = None
    """The wanted pod, live or still to be created. All other preflight pods are deleted."""
    again_after: float = math.inf
    """Seconds until time alone changes this."""


def preflight_state(
    factory: ChildFactory,
    wanted: Sequence[Object],
    outdated: Sequence[Object],
    snapshot: Snapshot,
) -> Preflight:
    """Return the state of the preflight of a change.

    Args:
        factory: of the resource.
        wanted: all target Deployments, by cell.
        outdated: those whose apply would replace pods.
        snapshot: of this pass.
    """
    # Revisions of cells differ by the cell's number only: the first one's stands for all.
    name = preflight_pod(factory.resource, revision_of(wanted[0]))
    live = snapshot.children.get(Ref("Pod", name))
    nodes = [
        (each, pod["spec"]["nodeName"])
        for each in outdated
        if (pod := serving_pod(each, snapshot)) is not None
    ]
    if not outdated or (live is None and not nodes):
        return Preflight()
    if not nodes:
        assert live is not None
        return _result(live, snapshot.now)
    drawn = _pod(factory, name, *nodes[0])
    if live is None:
        return Preflight(Stage.RUNNING, f"{name} is created", drawn)
    found = _result(live, snapshot.now)
    if found.stage is not Stage.PASSED and _hash_of(live) != _hash_of(drawn):
        return Preflight(Stage.RUNNING, f"{name} is created again on the target's node")
    return found


def _pod(factory: ChildFactory, name: str, deployment: Object, node: str) -> Object:
    spec = preflight_spec(deployment, node)
    pod = factory.make("Pod", name, {"spec": spec}, of=(PREFLIGHT, None))
    annotations = deployment["spec"]["template"]["metadata"].get("annotations", {})
    pod["metadata"]["annotations"] = dict(annotations) | pod["metadata"]["annotations"]
    return pod


def _hash_of(pod: Object) -> object:
    return (pod["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)


def _result(pod: Object, now: float) -> Preflight:
    """The result of a live preflight pod."""
    status, name = pod.get("status", {}), name_of(pod)
    if status.get("phase") == "Succeeded":
        return Preflight(Stage.PASSED, pod=pod)
    if status.get("reason") and not is_terminating(pod):
        # Evicted, out of time or its node shut down: the result is unknown.
        message = f"{name} was ended: {status['reason']}: {status.get('message', '')}"
        wait = (to_seconds(pod["metadata"].get("creationTimestamp")) or now) + RETRY_SECONDS - now
        kept = (pod, wait) if wait > 0 else (None, math.inf)
        return Preflight(Stage.STUCK, message.rstrip(" :."), *kept)
    found = diagnose(pod, int(pod["spec"]["activeDeadlineSeconds"]), now)
    if found is None or found.reason in _RUNNING:
        return Preflight(Stage.RUNNING, f"{name} runs" if found is None else found.message, pod)
    stage = Stage.STUCK if found.reason is PodReason.UNSCHEDULABLE else Stage.FAILED
    return Preflight(stage, found.message.rstrip("."), pod)
