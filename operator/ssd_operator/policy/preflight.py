"""A change is tried before a target that serves makes room for it. Pure.

A pod beside the target runs the new image with the new settings and ``--print-config``: the image
can be pulled, the process takes its settings, and nothing is loaded. All state is the pod itself:
its name says of which revision it is, its phase what came of it.

*Decision*: one preflight a revision, on the node of the first cell that is to roll. *Because* cells
differ in nothing that could fail but the node. *Not chosen*: one a node, which would also warm the
image of each. *Revisit when* pulls hold up the later cells of a roll.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ssd_operator.api.spec import Object
from ssd_operator.children.names import HASH_ANNOTATION, PREFLIGHT, preflight_pod, revision_of
from ssd_operator.children.objects import ChildFactory
from ssd_operator.children.pods import preflight_spec
from ssd_operator.observe.cluster import ref_of
from ssd_operator.observe.diagnosis import Trouble, diagnose
from ssd_operator.observe.facts import Observed, Ref
from ssd_operator.observe.pod_state import is_leaving, name_of, to_seconds
from ssd_operator.policy.rollout import Stage, outdated, serving_pod

PULL_SECONDS = 10.0
"""A pull that fails in a pod's first moments may yet succeed."""
RETRY_SECONDS = 60.0
"""Until a preflight that the cluster refused or ended is asked for again."""
_RUNNING = frozenset({Trouble.LOADING, Trouble.DRAINING})


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known of the revision wanted, and what is to be done to know it."""

    stage: Stage = Stage.NONE
    message: str = ""
    """What was found, without a full stop."""
    pod: Object | None = None
    """The one to be there: live, or still to be made. All others go."""
    again_after: float = math.inf
    """Seconds until time alone changes this."""

    @property
    def children(self) -> list[Object]:
        """The pod, if one is wanted."""
        return [] if self.pod is None else [self.pod]

    def heeding(self, refusals: Mapping[Ref, str]) -> "Preflight":
        """The same, once the API server has refused objects with these words."""
        words = next((refusals[ref] for ref in map(ref_of, self.children) if ref in refusals), None)
        return self if words is None else replace(self, stage=Stage.STUCK, message=words)


def preflight(
    factory: ChildFactory, wanted: Sequence[Object], observed: Observed, now: float
) -> Preflight:
    """Say how far the preflight of a change is.

    Args:
        factory: of the resource.
        wanted: target Deployments as they should be, by cell.
        observed: the snapshot.
        now: seconds since the epoch.
    """
    changed = outdated(wanted, observed)
    # Revisions of cells differ by the cell's number only: the first one's stands for all.
    name = preflight_pod(factory.resource, revision_of(wanted[0]))
    live = observed.children.get(Ref("Pod", name))
    nodes = [
        (each, pod["spec"]["nodeName"])
        for each in changed
        if (pod := serving_pod(each, observed)) is not None
    ]
    if not changed or (live is None and not nodes):
        return Preflight()
    drawn = _draw(factory, name, *nodes[0]) if nodes else live
    assert drawn is not None
    if live is None:
        return Preflight(Stage.RUNNING, f"{name} is made", drawn)
    judged = _judge(live, now)
    if judged.stage is not Stage.PASSED and _hash_of(live) != _hash_of(drawn):
        return Preflight(Stage.RUNNING, f"{name} is made anew beside the target")
    return judged


def _draw(factory: ChildFactory, name: str, deployment: Object, node: str) -> Object:
    spec = preflight_spec(deployment, node)
    pod = factory.make("v1", "Pod", name, {"spec": spec}, of=(PREFLIGHT, None))
    annotations = deployment["spec"]["template"]["metadata"].get("annotations", {})
    pod["metadata"]["annotations"] = dict(annotations) | pod["metadata"]["annotations"]
    return pod


def _hash_of(pod: Object) -> object:
    return (pod["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)


def _judge(pod: Object, now: float) -> Preflight:
    """What a preflight's pod has found out."""
    status, age = pod.get("status", {}), _age(pod, now)
    if status.get("phase") == "Succeeded":
        return Preflight(Stage.PASSED, pod=pod)
    if status.get("reason") and not is_leaving(pod):
        # Evicted, out of time, its node shut down: nobody knows what it would have found.
        words = f"{name_of(pod)} was ended: {status['reason']}: {status.get('message', '')}"
        wait = RETRY_SECONDS - age
        kept = (pod, wait) if wait > 0 else (None, math.inf)
        return Preflight(Stage.STUCK, words.rstrip(" :."), *kept)
    found = diagnose(pod, int(pod["spec"]["activeDeadlineSeconds"]), now)
    if found is None or found.trouble in _RUNNING:
        return Preflight(
            Stage.RUNNING, f"{name_of(pod)} runs" if found is None else found.message, pod
        )
    message = found.message.rstrip(".")
    if found.trouble is Trouble.IMAGE_PULL and age < PULL_SECONDS:
        return Preflight(Stage.RUNNING, message, pod, PULL_SECONDS - age)
    is_stuck = found.trouble is Trouble.UNSCHEDULABLE
    return Preflight(Stage.STUCK if is_stuck else Stage.FAILED, message, pod)


def _age(pod: Object, now: float) -> float:
    made_at = to_seconds(pod["metadata"].get("creationTimestamp"))
    return 0.0 if made_at is None else now - made_at
