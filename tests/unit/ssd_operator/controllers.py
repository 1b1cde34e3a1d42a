"""Controllers and kubelet of a cluster in memory; each step is one change."""

import hashlib
import json
from collections.abc import Iterable
from itertools import count

from tests.unit.ssd_operator.memory_cluster import MemoryCluster

from ssd_operator.api.spec import Object
from ssd_operator.children.objects import COMPONENT_LABEL, TEMPLATE_HASH_LABEL, Component
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import (
    condition_of,
    has_ended,
    is_live,
    is_owned_by,
    is_ready,
    name_of,
    revision_of,
    to_text,
)

_COMPLETE = "NewReplicaSetAvailable"
_COST = "controller.kubernetes.io/pod-deletion-cost"


class Controllers:
    """Deployments become pods, pods become ready. One call of ``step`` is one moment."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._names = count()
        self.broken: set[str] = set()
        """Pods, by name or revision, that do not become ready."""
        self._templates: set[tuple[str, str]] = set()
        """Deployments, each with the hash of a template of which it has made pods."""
        self._replaced: set[str] = set()
        """Deployments whose next pod is not replaced before ``minReadySeconds`` have passed."""
        self.outcomes: dict[str, Object] = {}
        """Status of preflights by their image; of others they succeed."""

    def settle(self) -> bool:
        """Step until nothing changes; whether anything did. A new pod has time before each call."""
        self._replaced.clear()
        for number in range(100):
            if not self.step():
                return number > 0
        raise AssertionError("the controllers do not settle")

    def step(self) -> bool:
        """Let each Deployment make one move; whether any was made."""
        deployments = [each for each in self._cluster.of_kind("Deployment") if "spec" in each]
        moved = [self._reconcile(each) or self._write_status(each) for each in deployments]
        moved += [self._run(pod) for pod in self.preflights()]
        services = [each for each in self._cluster.of_kind("Service") if "spec" in each]
        return any(moved + [self._publish(each) for each in services])

    def preflights(self) -> list[Object]:
        """Pods that try a change."""
        pods = self._cluster.of_kind("Pod")
        return [
            pod for pod in pods if pod["metadata"]["labels"][COMPONENT_LABEL] == Component.PREFLIGHT
        ]

    def kill(self, pod: Object) -> None:
        """A pod's container dies; the kubelet starts it again at the next step."""
        self._set_ready(pod, is_up=False)

    def make_unready(self, pod: Object) -> None:
        """A pod is not ready any more, until it is taken out of ``broken``."""
        self.broken.add(name_of(pod))
        self.kill(pod)

    def _reconcile(self, deployment: Object) -> bool:
        spec, pods = deployment["spec"], pods_of(self._cluster, deployment)
        old = self._replaceable(deployment, pods)
        most = spec["replicas"] + surge_of(deployment, pods)
        num_extra = len(pods) - most
        if num_extra > 0:
            for pod in first_to_go(pods, num_extra):
                self._remove(pod)
        elif old and spec["strategy"]["type"] == "Recreate":
            for pod in old:
                self._remove(pod)
        elif len(pods) < most and not self._is_blocked(deployment):
            self._start(deployment)
        elif any(not is_ready(pod) and self._can_be_ready(pod) for pod in pods):
            for pod in pods:
                if self._can_be_ready(pod):
                    self._set_ready(pod, is_up=True)
        elif old:
            self._remove(old[0])
            self._replaced |= {name_of(deployment)} if spec.get("minReadySeconds") else set()
        else:
            return False
        return True

    def _replaceable(self, deployment: Object, pods: list[Object]) -> list[Object]:
        """Pods of another template that may be removed now; at most one pod is unavailable."""
        spec, are_ready = deployment["spec"], all(map(is_ready, pods))
        if spec.get("paused") or name_of(deployment) in self._replaced:
            return []
        is_free = spec["strategy"]["type"] == "Recreate" or are_ready
        old = [pod for pod in pods if not is_of_template(pod, deployment)]
        return [pod for pod in old if is_free or not is_ready(pod)]

    def _is_blocked(self, deployment: Object) -> bool:
        """Whether Recreate waits for a pod of another template that is being deleted."""
        uid = deployment["metadata"]["uid"]
        return deployment["spec"]["strategy"]["type"] == "Recreate" and any(
            is_owned_by(pod, uid) and not is_live(pod) and not is_of_template(pod, deployment)
            for pod in self._cluster.of_kind("Pod")
            if not has_ended(pod)
        )

    def _run(self, pod: Object) -> bool:
        image = pod["spec"]["containers"][0]["image"]
        status = self.outcomes.get(image, {"phase": "Succeeded"})
        if pod.get("status") == status:
            return False
        self._cluster.put({**pod, "spec": {**pod["spec"], "nodeName": "n1"}, "status": status})
        return True

    def _publish(self, service: Object) -> bool:
        """Write the EndpointSlice of a Service that has an address."""
        metadata, selected = service["metadata"], service["spec"].get("selector", {})
        if service["spec"].get("clusterIP") == "None" or not selected:
            return False
        name = metadata["name"]
        pods = [
            pod
            for pod in self._cluster.of_kind("Pod")
            if selected.items() <= pod["metadata"].get("labels", {}).items() and is_live(pod)
        ]
        endpoints = [
            {"targetRef": {"name": name_of(pod)}, "conditions": {"ready": is_ready(pod)}}
            for pod in pods
        ]
        ref = Ref("EndpointSlice", f"{name}-slice")
        found = self._cluster.objects.get((metadata["namespace"], ref), {})
        if found.get("endpoints") == endpoints:
            return False
        labels = metadata.get("labels", {}) | {"kubernetes.io/service-name": name}
        about = _owned_by(service, ref.name, labels)
        about = {**found.get("metadata", {}), **about}
        self._cluster.put({"kind": ref.kind, "metadata": about, "endpoints": endpoints})
        return True

    def _can_be_ready(self, pod: Object) -> bool:
        return self.broken.isdisjoint((revision_of(pod), name_of(pod)))

    def _write_status(self, deployment: Object) -> bool:
        before, wanted = deployment.get("status", {}), deployment["spec"]["replicas"]
        pods = pods_of(self._cluster, deployment)
        num_updated = sum(is_of_template(pod, deployment) for pod in pods)
        num_ready = sum(is_ready(pod) for pod in pods)
        is_rolled = num_updated == len(pods) == wanted
        # A Deployment with an existing ReplicaSet stays complete, whatever happens to its pods.
        was_complete = condition_of(deployment, "Progressing").get("reason") == _COMPLETE
        is_known = (deployment["metadata"]["uid"], template_hash(deployment)) in self._templates
        is_kept = is_rolled or deployment["spec"]["strategy"]["type"] == "Recreate"
        is_complete = (is_rolled and num_ready == wanted) or (was_complete and is_known and is_kept)
        reason = _COMPLETE if is_complete else "ReplicaSetUpdated"
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": num_updated,
            "readyReplicas": num_ready,
            "conditions": [{"type": "Progressing", "status": "True", "reason": reason}],
        }
        if before == status:
            return False
        self._cluster.put(deployment | {"status": status})
        return True

    def _start(self, deployment: Object) -> None:
        template, number = deployment["spec"]["template"], next(self._names)
        name, mark = name_of(deployment), template_hash(deployment)
        self._templates.add((deployment["metadata"]["uid"], mark))
        labels = template["metadata"]["labels"] | {TEMPLATE_HASH_LABEL: mark}
        metadata = _owned_by(deployment, f"{name}-{number}", labels)
        metadata["generateName"] = f"{name}-{mark}-"
        metadata["ownerReferences"][0] |= {"kind": "ReplicaSet", "name": f"{name}-{mark}"}
        spec = {name: template["spec"][name] for name in ("serviceAccountName", "containers")}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"nodeName": "n1", **spec},
            "status": {"podIP": f"10.0.0.{number % 250}", "phase": "Running"},
        }
        self._set_ready(pod, is_up=False)

    def _set_ready(self, pod: Object, *, is_up: bool) -> None:
        since = to_text(self._cluster.now)
        conditions = [
            {"type": "Ready", "status": str(is_up), "lastTransitionTime": since},
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": since},
        ]
        status = {**pod["status"], "conditions": conditions}
        self._cluster.put({**pod, "metadata": dict(pod["metadata"]), "status": status})

    def _remove(self, pod: Object) -> None:
        self._cluster.remove(pod["metadata"]["namespace"], Ref("Pod", name_of(pod)))


def pods_of(cluster: MemoryCluster, deployment: Object) -> list[Object]:
    """Live pods of a Deployment."""
    uid = deployment["metadata"]["uid"]
    return [pod for pod in cluster.of_kind("Pod") if is_owned_by(pod, uid) and is_live(pod)]


def _owned_by(owner: Object, name: str, labels: Object) -> Object:
    """Metadata of an object that a controller makes for another one."""
    reference = {"kind": owner["kind"], "uid": owner["metadata"]["uid"], "controller": True}
    return {
        "namespace": owner["metadata"]["namespace"],
        "name": name,
        "labels": labels,
        "ownerReferences": [reference | {"name": name_of(owner)}],
    }


def template_hash(deployment: Object) -> str:
    """The label that distinguishes the ReplicaSets of a Deployment."""
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def is_of_template(pod: Object, deployment: Object) -> bool:
    """Whether a pod is of the template that its Deployment has now."""
    return bool(pod["metadata"]["labels"][TEMPLATE_HASH_LABEL] == template_hash(deployment))


def surge_of(deployment: Object, pods: Iterable[Object]) -> int:
    """Pods that a Deployment has beside its replicas while it replaces others."""
    spec = deployment["spec"]
    num_old = sum(not is_of_template(pod, deployment) for pod in pods)
    surge = spec["strategy"].get("rollingUpdate", {}).get("maxSurge", 0)
    return 0 if spec.get("paused") else min(surge, num_old)


def first_to_go(pods: Iterable[Object], number: int) -> list[Object]:
    """Those that a ReplicaSet deletes when it has this many too many."""
    return sorted(pods, key=_deletion_order)[:number]


def _deletion_order(pod: Object) -> tuple[bool, int]:
    """As a ReplicaSet picks, the first to go first."""
    annotations = pod["metadata"].get("annotations") or {}
    return is_ready(pod), int(annotations.get(_COST, "0"))
