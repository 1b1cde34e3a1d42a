"""A healthy resource with pods, Deployments and links, of which each test changes one part."""

from dataclasses import dataclass, field, replace
from typing import Any

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.api.spec import (
    Autoscaling,
    DraftSpec,
    Object,
    Resource,
    ScalingMode,
    Source,
    Spec,
    TargetSpec,
)
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import DRAIN_DEADLINE_ANNOTATION, is_ready, name_of, to_text
from ssd_operator.observe.snapshot import Snapshot, TargetReport
from ssd_operator.policy.apply_failures import ApplyFailure, Cause, Results
from ssd_operator.policy.plan import PassPlan, PlanState
from ssd_operator.policy.scaling import Decision, Demand, History, Reason
from ssd_operator.status.pass_result import PassResult

NOW = 1_000_000.0
PLACED: Object = {"type": "PodScheduled", "status": "True", "lastTransitionTime": to_text(NOW)}


def pod(component: str, name: str, *, ready: bool = True, cell: int = 0, **status: Any) -> Object:
    since = to_text(NOW - 100)
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": since}
    return {
        "metadata": {
            "name": name,
            "labels": {
                "ssd.dev/name": "demo",
                "ssd.dev/component": component,
                "ssd.dev/cell": str(cell),
                "ssd.dev/revision": "r1",
            },
            "annotations": {},
        },
        "spec": {"nodeName": "n1"},
        "status": {"conditions": [condition, PLACED], **status},
    }


def target(name: str = "t0", *, ready: bool = True, cell: int = 0, **status: Any) -> Object:
    return pod("target", name, ready=ready, cell=cell, **status)


def draft(name: str, *, ready: bool = True, cell: int = 0, **status: Any) -> Object:
    return pod("draft", name, ready=ready, cell=cell, **status)


def unscheduled(thing: Object, message: str = "0/1 nodes are available: no room.") -> Object:
    """The same pod, for which the scheduler found no node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    conditions = [{"type": "Ready", "status": "False"}, {**condition, "message": message}]
    return thing | {"spec": {}, "status": {"conditions": conditions}}


def marked(thing: Object) -> Object:
    """The same pod, which is drained."""
    annotations = {DRAIN_DEADLINE_ANNOTATION: to_text(NOW + 9)}
    return thing | {"metadata": thing["metadata"] | {"annotations": annotations}}


def terminating(thing: Object, *, ends_at: float = NOW) -> Object:
    """The same pod, being deleted; its grace period ends then."""
    return thing | {"metadata": thing["metadata"] | {"deletionTimestamp": to_text(ends_at)}}


def deployment(name: str, *, revision: int = 1, **condition: Any) -> Object:
    found = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
    return {
        "metadata": {
            "name": name,
            "generation": 3,
            "labels": {"ssd.dev/revision": "r1"},
            "annotations": {"deployment.kubernetes.io/revision": str(revision)},
        },
        "status": {"observedGeneration": 3, "conditions": [found | condition]},
    }


def link(draft_pod: str = "d0", state: str = "Active", **more: Any) -> LinkStatus:
    fact = {"address": "10.0.0.1:50052", "draft_pod": draft_pod, "state": state.lower()}
    fact |= {"transport": "tcp"} if state == "Active" else {}
    return LinkStatus(**fact | more)


def answer(
    target: str, *links: LinkStatus, age: float = 1.0, **more: Any
) -> tuple[str, TargetReport]:
    return target, TargetReport(PoolStatus(links=links, **more), NOW - age)


UP_TO_DATE = {"demo-target-0": "r1", "demo-draft-0": "r1"}


def refused(ref: Ref, message: str = "no.", cause: Cause = "Refused") -> Results:
    """The API server refused one object."""
    return Results(failures={ref: ApplyFailure(cause, message, ("", 1, ""), NOW)})


def decided(replicas: int, reason: Reason, demand: Demand | None = None) -> PassPlan:
    """The Internal loop wants this number of drafts."""
    decision = Decision(replicas, reason)
    return PassPlan(
        scale=decision, state=PlanState(history=History(decision=decision, demand=demand))
    )


@dataclass
class Scene:
    """Two drafts and one target, all ready and linked."""

    cells: int = 1
    drafts: int = 2
    mode: ScalingMode | None = None
    has_service: bool = True
    pods: tuple[Object, ...] = (target(), draft("d0"), draft("d1"))
    deployments: tuple[Object, ...] = (deployment("demo-target-0"), deployment("demo-draft-0"))
    pools: tuple[tuple[str, TargetReport], ...] = (answer("t0", link("d0"), link("d1")),)
    plan: PassPlan = field(default_factory=lambda: PassPlan(revisions=UP_TO_DATE))
    results: Results = field(default_factory=Results)
    pending: dict[str, float] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def resource(self) -> Resource:
        scaling = None if self.mode is None else Autoscaling(mode=self.mode)
        fixed: dict[str, Any] = {
            "accelerator": "cpu",
            "target": TargetSpec(source=Source(uri="demo://target"), replicas=self.cells),
            "draft": DraftSpec(
                source=Source(uri="demo://draft"), replicas=self.drafts, autoscaling=scaling
            ),
        }
        spec = Spec(**fixed | self.spec)
        return Resource(namespace="default", name="demo", uid="u", generation=4, spec=spec)

    @property
    def snapshot(self) -> Snapshot:
        children = {Ref("Deployment", made["metadata"]["name"]): made for made in self.deployments}
        if self.has_service:
            children[Ref("Service", "demo")] = {"metadata": {"name": "demo"}}
        endpoints = frozenset(name_of(pod) for pod in self.pods if is_ready(pod))
        facts = {"endpoints": endpoints, "pods": self.pods, "pools": dict(self.pools)} | self.facts
        children |= facts.pop("children", {})
        children = {
            ref: each for ref, each in children.items() if ref not in facts.get("foreign", ())
        }
        return Snapshot(resource=self.resource, now=NOW, children=children, **facts)

    @property
    def result(self) -> PassResult:
        state = replace(self.plan.state, pending=self.pending)
        return PassResult(snapshot=self.snapshot, plan=self.plan, results=self.results, state=state)
