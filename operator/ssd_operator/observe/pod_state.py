"""Readers of the state of pods and of other objects. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from ssd_operator.api.reserved import TLS_VOLUME, TOKENS_VOLUME
from ssd_operator.api.spec import GROUP, Object
from ssd_operator.children.objects import (
    CELL_LABEL,
    COMPONENT_LABEL,
    HASH_ANNOTATION,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    OPERATOR,
    REVISION_LABEL,
    TEMPLATE_HASH_LABEL,
)

DRAIN_DEADLINE_ANNOTATION = f"{GROUP}/drain-deadline"
"""Annotation of a draft's pod that is drained: latest end of the drain, RFC 3339."""
LOST_SECONDS = 60.0
"""A pod that is being deleted for longer than its grace period and this is on a lost node."""
UNREADY_SECONDS = 60.0
"""A target that is loaded and not ready for longer is broken; for less, it may be busy."""
_SERVICE_LABEL = "kubernetes.io/service-name"


@dataclass(frozen=True, slots=True)
class Address:
    """Where the process of a pod is called."""

    host: str
    """IP address of the pod."""
    is_tls: bool = False
    """Whether its gRPC port has TLS."""
    has_tokens: bool = False
    """Whether it accepts tokens."""


def address_of(pod: Object) -> Address | None:
    """Where the process of a pod is called; None before it has an address."""
    host = (pod.get("status") or {}).get("podIP")
    return Address(host, is_tls(pod), TOKENS_VOLUME in _volumes(pod)) if host else None


def is_tls(pod: Object) -> bool:
    """Whether the ports of an engine have TLS, by its pod or the template of its pods.

    A pod keeps its protocol while the resource changes.
    """
    return TLS_VOLUME in _volumes(pod)


def _volumes(pod: Object) -> set[str]:
    """Names of a pod's volumes."""
    return {volume["name"] for volume in (pod.get("spec") or {}).get("volumes") or ()}


def name_of(thing: Object) -> str:
    """Name of an object."""
    return str(thing["metadata"]["name"])


def labels_of(thing: Object) -> Object:
    """Labels of an object."""
    return thing["metadata"].get("labels") or {}


def annotations_of(thing: Object) -> Object:
    """Annotations of an object."""
    return thing["metadata"].get("annotations") or {}


def revision_of(workload: Object) -> str:
    """Revision of a Deployment's pods, or of a pod; empty where there is none."""
    template = workload.get("spec", {}).get("template", workload)
    return str(labels_of({"metadata": {}} | template).get(REVISION_LABEL, ""))


def cell_of(child: Object) -> int:
    """Cell of a pod or Deployment; 0 for those of a Pool, which have no such label."""
    return int(labels_of(child).get(CELL_LABEL, 0))


def maker_of(pod: Object) -> str:
    """Name of the Deployment that made a pod; labels of other children give their own name."""
    labels = labels_of(pod)
    name = f"{labels.get(NAME_LABEL)}-{labels.get(COMPONENT_LABEL)}"
    return f"{name}-{labels[CELL_LABEL]}" if CELL_LABEL in labels else name


def controller_of(thing: Object) -> Object:
    """The owner reference that controls an object; empty without one."""
    owners: list[Object] = thing["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def is_owned_by(thing: Object, uid: str) -> bool:
    """Whether a resource is an object's controller."""
    return bool(controller_of(thing).get("uid") == uid)


def is_ours(thing: Object, uid: str) -> bool:
    """Whether an object is a child: controlled by the resource, or ours without a controller."""
    if controller_of(thing):
        return is_owned_by(thing, uid)
    return bool(labels_of(thing).get(MANAGED_BY_LABEL) == OPERATOR)


def is_orphan(thing: Object) -> bool:
    """Whether the operator made an object whose owner was deleted with ``--cascade=orphan``.

    A person's copy has another name, or no annotation of the operator (``kubectl expose``).
    """
    is_made = HASH_ANNOTATION in annotations_of(thing) and name_of(thing) == maker_of(thing)
    return is_made and not thing["metadata"].get("ownerReferences")


def is_pod_of(pod: Object, name: str, components: Collection[str]) -> bool:
    """Whether a ReplicaSet of a Deployment of these components made and controls a pod.

    A pod that a person has removed from its ReplicaSet, or has labelled like ours, is neither
    counted nor deleted. A ReplicaSet releases a pod whose cell is not a number.
    """
    labels, controller = labels_of(pod), controller_of(pod)
    return (
        labels.get(NAME_LABEL) == name
        and labels.get(COMPONENT_LABEL) in components
        and str(labels.get(CELL_LABEL, 0)).isdecimal()
        and controller.get("kind") == "ReplicaSet"
        and controller.get("name") == f"{maker_of(pod)}-{labels.get(TEMPLATE_HASH_LABEL)}"
    )


def is_live(pod: Object) -> bool:
    """Whether a ReplicaSet still counts the pod: it has not ended and is not being deleted."""
    return not has_ended(pod) and not is_terminating(pod)


def has_ended(pod: Object) -> bool:
    """Whether all processes of the pod have ended for good."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_accepted(pod: Object) -> bool:
    """Whether the kubelet of the pod's node has accepted the pod."""
    status = pod.get("status", {})
    return bool(status.get("initContainerStatuses") or status.get("containerStatuses"))


def made_at(thing: Object) -> float:
    """When an object was created, in seconds since the epoch; 0 for one without this time."""
    return to_seconds(thing["metadata"].get("creationTimestamp")) or 0.0


def is_terminating(thing: Object) -> bool:
    """Whether an object is being deleted."""
    return bool(thing["metadata"].get("deletionTimestamp"))


def is_lost(pod: Object, now: float) -> bool:
    """Whether the pod's deletion does not end, because no kubelet ends the pod."""
    ends_at = to_seconds(pod["metadata"].get("deletionTimestamp"))
    return ends_at is not None and now - ends_at > LOST_SECONDS


def is_scheduled(pod: Object) -> bool:
    """Whether the pod has a node."""
    return bool(pod.get("spec", {}).get("nodeName"))


def is_unschedulable(pod: Object) -> bool:
    """Whether the scheduler has found no node for the pod."""
    reason = str(condition_of(pod, "PodScheduled").get("reason"))
    return reason == "Unschedulable" and not is_scheduled(pod)


def is_ready(pod: Object) -> bool:
    """Whether the pod is live and Services send calls to it."""
    return is_live(pod) and condition_of(pod, "Ready").get("status") == "True"


def has_started(pod: Object) -> bool:
    """Whether the pod is live and its process has loaded; it may be too busy to be ready."""
    containers = pod.get("status", {}).get("containerStatuses") or ()
    # A sidecar may have started although the process has crashed.
    has_loaded = containers and all(container.get("started") for container in containers)
    return is_live(pod) and bool(has_loaded or is_ready(pod))


def unready_deadline(pod: Object, now: float) -> float | None:
    """When a loaded pod that is not ready will count as broken; None for any other pod.

    A pod with a container that has crashed, or that starts again, is not loaded.
    """
    containers = pod.get("status", {}).get("containerStatuses") or ()
    has_loaded = is_live(pod) and containers and all(each.get("started") for each in containers)
    since = to_seconds(condition_of(pod, "Ready").get("lastTransitionTime"))
    if is_ready(pod) or not has_loaded or since is None or abs(now - since) >= UNREADY_SECONDS:
        return None
    return since + UNREADY_SECONDS


def endpoints_of(service: str, slices: Iterable[Object]) -> frozenset[str]:
    """Names of the ready pods of a Service, from the EndpointSlices of a namespace."""
    return frozenset(
        str((endpoint.get("targetRef") or {}).get("name", ""))
        for endpoint_slice in slices
        if labels_of(endpoint_slice).get(_SERVICE_LABEL) == service
        for endpoint in endpoint_slice.get("endpoints") or ()
        # Absent means unknown, which counts as true.
        if (endpoint.get("conditions") or {}).get("ready") is not False
    )


def drain_deadline_of(pod: Object) -> float | None:
    """When the drain of a draft ends at the latest; None without a drain or a valid time."""
    return to_seconds(annotations_of(pod).get(DRAIN_DEADLINE_ANNOTATION))


def condition_of(thing: Object, kind: str) -> Object:
    """A condition of an object that has ``status.conditions``; empty where there is none."""
    return condition_in(thing.get("status", {}), kind)


def condition_in(status: Object, kind: str) -> Object:
    """A condition of a status; empty where there is none."""
    conditions = status.get("conditions") or []
    return next((condition for condition in conditions if condition.get("type") == kind), {})


def is_rolling(deployment: Object) -> bool:
    """Whether the newest pods of a Deployment have not all been available yet.

    After a pause, its controller may leave the reason ``DeploymentResumed`` in the condition for
    good (seen with Kubernetes 1.34), so the numbers of pods count as well.
    """
    status, wanted = deployment.get("status", {}), deployment.get("spec", {}).get("replicas")
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return True
    numbers = ("replicas", "updatedReplicas", "availableReplicas")
    is_complete = all(status.get(each, 0) == wanted for each in numbers)
    reason = condition_of(deployment, "Progressing").get("reason")
    return not is_complete and reason != "NewReplicaSetAvailable"


def to_text(seconds: float) -> str:
    """A time as Kubernetes writes it: RFC 3339, UTC, whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_seconds(text: object) -> float | None:
    """Seconds since the epoch; None for a text that is no time."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time.replace(tzinfo=time.tzinfo or UTC).timestamp()
