"""The conditions of a resource, by what one pass has seen and done."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.ssd_operator.scenes import (
    NOW,
    Scene,
    answer,
    decided,
    deployment,
    draft,
    link,
    marked,
    pod,
    refused,
    target,
    terminating,
    unscheduled,
)

from ssd.rpc.pool_codec import LinkStatus
from ssd_operator.api.gateway import Gateway
from ssd_operator.api.spec import DraftSpec, Object, ScalingMode, Source
from ssd_operator.observe.cluster import ForbiddenError, Ref, ref_of
from ssd_operator.observe.pod_state import endpoints_of, to_text
from ssd_operator.policy.apply_failures import Cause, Results
from ssd_operator.policy.plan import PassPlan
from ssd_operator.policy.rollout import Preflight, Stage
from ssd_operator.policy.scaling import Demand
from ssd_operator.status.condition_rules import conditions

TARGET, DRAFTED = Ref("Deployment", "demo-target-0"), Ref("Deployment", "demo-draft-0")
SERVICE = Ref("Service", "demo")
BALANCED = Ref("Service", "demo-targets")
ACCOUNT = Ref("ServiceAccount", "demo-draft")
BOTH = (deployment("demo-target-0"), deployment("demo-target-1"))
"""Deployments of two cells."""
PULL = [{"image": "x", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]
SECOND = target("t1", cell=1)
PAIR = (target(), draft("d0"))


def test_all_conditions_of_a_healthy_resource_are_true() -> None:
    found = {
        (kind, each.status == "True", each.reason)
        for kind, each in conditions(Scene().result).items()
    }
    assert found == {
        ("Ready", True, "Serving"),
        ("TargetReady", True, "AllReady"),
        ("DraftReady", True, "AllReady"),
        ("SpeculationActive", True, "Active"),
        ("DraftCapacity", True, "Sufficient"),
        ("Progressing", True, "UpToDate"),
        ("SpecValid", True, "Valid"),
        ("ResourcesOwned", True, "Owned"),
    }


def foreign(ref: Ref, **more: Any) -> Scene:
    """An object of another owner has the name of a child."""
    return Scene(facts={"foreign": {ref: "SSDDeployment x"}}, **more)


def nothing(**more: Any) -> Scene:
    """No pod and no Deployment is there yet."""
    return Scene(pods=(), deployments=(), **more)


def unserved(**more: Any) -> Scene:
    """The Service that clients use is missing."""
    return Scene(has_service=False, results=Results(**more))


READY = [
    (Scene(pods=(target(),)), "True Serving"),
    (Scene(cells=2), "True ServingPartly"),
    (Scene(pods=(target(ready=False),)), "False Loading"),
    (Scene(pods=()), "False Loading"),
    (Scene(pods=(terminating(target()),)), "False Draining"),
    (Scene(pods=(pod("gateway", "g0"), unscheduled(target()))), "False Unschedulable"),
    (foreign(SERVICE), "False NameTaken"),
    (foreign(BALANCED), "False NameTaken", "Service demo-targets belongs to SSDDeployment x;"),
    (foreign(ACCOUNT), "True Serving"),
    (foreign(ACCOUNT, pods=(), deployments=()), "False NameTaken"),
    (nothing(results=refused(TARGET)), "False PodTemplateInvalid"),
    (Scene(results=refused(TARGET)), "True Serving"),
    (nothing(spec={"paused": True}), "False Paused"),
    (unserved(), "False EndpointMissing"),
    (unserved(applied={SERVICE}), "True Serving"),
    (unserved(failed_calls={SERVICE: ForbiddenError("no quota.")}), "False Forbidden"),
    (Scene(has_service=False, results=refused(SERVICE)), "False ObjectRefused"),
    (Scene(facts={"endpoints": frozenset()}), "False EndpointMissing"),
    (Scene(facts={"endpoints": frozenset({"d0", "another"})}), "False EndpointMissing"),
]


def rolling(*pods: Object, revision: int, **condition: Any) -> Scene:
    """The Deployment of the only cell has not finished its roll."""
    condition = {"reason": "ReplicaSetUpdated"} | condition
    return Scene(
        pods=pods, deployments=(deployment("demo-target-0", revision=revision, **condition),)
    )


FORBIDDEN = {"type": "ReplicaFailure", "message": "violates restricted"}
TWO_DOWN = (target(ready=False), target("t1", ready=False, cell=1, containerStatuses=PULL))
TARGETS = [
    (
        Scene(cells=2, pods=TWO_DOWN, deployments=BOTH),
        "False ImagePull",
        "0 of 2 targets are ready; t1 cannot pull x: denied.",
    ),
    (Scene(cells=2, deployments=BOTH), "False Loading"),
    (Scene(pods=(unscheduled(target()),)), "False Unschedulable"),
    (Scene(pods=(target(ready=False, containerStatuses=PULL),)), "False ImagePull"),
    (rolling(target(ready=False), revision=2), "False RollingOut"),
    (rolling(terminating(target()), revision=2), "False RollingOut"),
    (rolling(target(ready=False), revision=1), "False Loading"),
    (rolling(revision=1, **FORBIDDEN), "False PodForbidden"),
]
UNREADY = deployment("demo-draft-0")
UNREADY["status"]["conditions"].append({"type": "Available", "status": "True"})
AVAILABLE = Scene(
    drafts=1,
    pods=(target(), draft("d0", ready=False)),
    deployments=(deployment("demo-target-0"), UNREADY),
    pools=(),
)
"""The Deployment of drafts is available without a ready pod."""
DRAFTS = [
    (Scene(drafts=0, pods=(target(),)), "True ScaledToZero"),
    (Scene(drafts=1, pods=(*PAIR, marked(draft("d1")))), "True AllReady"),
    (Scene(drafts=2, pods=(*PAIR, marked(draft("d1")))), "False Scaling"),
    (Scene(pods=PAIR), "False Scaling"),
    (Scene(pods=(*PAIR, draft("d1", ready=False))), "False Loading"),
    (Scene(pods=(*PAIR, unscheduled(draft("d1")))), "False Unschedulable"),
    (AVAILABLE, "False Loading"),
]


def unanswered_for(ready_seconds: float) -> Scene:
    """A target that has been ready for this long and has not answered."""
    pods = (target(), draft("d0"), draft("d1"))
    pods[0]["status"]["conditions"][0]["lastTransitionTime"] = to_text(NOW - ready_seconds)
    return Scene(pods=pods, pools=())


def refusing(reason: str) -> LinkStatus:
    return link("d0", "Refused", reason=reason)


def linked(*links: LinkStatus, **more: Any) -> Scene:
    """The target has these links."""
    return Scene(pools=(answer("t0", *links, **more),))


MISFIT = refusing("tokenizer_fingerprint: this draft has 1, the target has 2")
TOO_SLOW = refusing("link_too_slow: its round trip is 312 us")
TWO_SERVE = Scene(cells=2, pods=(target(), SECOND, draft("d0")))
SPECULATION = [
    (Scene(pods=(target(ready=False),)), "False NoDrafts"),
    (Scene(drafts=0), "False NoDrafts"),
    (linked(), "False NoDrafts"),
    (linked(link("d0", "Lost", reason="gone")), "False NoDrafts"),
    (linked(MISFIT), "False TokenizerMismatch"),
    (linked(refusing("vocab_size: this draft has 1")), "False VocabularyMismatch"),
    (linked(refusing("wire_version: this draft has 1")), "False WireVersionMismatch"),
    (linked(link("d0", "Quarantined", reason="late")), "False Quarantined"),
    (
        linked(TOO_SLOW),
        "False LinkTooSlow",
        "t0 and d0: its round trip is 312 us",
        "(transport.maxRoundTripMicroseconds).",
    ),
    (linked(TOO_SLOW, link("d1")), "True Active"),
    (linked(MISFIT, link("d1")), "True Active"),
    (linked(link("d0"), age=31), "Unknown TargetUnreachable"),
    (unanswered_for(31), "Unknown TargetUnreachable"),
    (
        replace(unanswered_for(31), facts={"call_errors": {"t0": "the certificate has expired."}}),
        "Unknown TargetUnreachable",
        "t0 has not reported its links for 30 s: the certificate has expired.",
    ),
    (unanswered_for(29), "False NoDrafts"),
    (TWO_SERVE, "Unknown TargetUnreachable"),
    (replace(TWO_SERVE, pools=(answer("t1", MISFIT),)), "False TokenizerMismatch"),
]
NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
NO_CPU = "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match pod affinity rules."
CPU_DRAFT = {
    "accelerator": "nvidia",
    "draft": DraftSpec(source=Source(uri="demo://draft"), device="cpu", replicas=2),
}
CAPACITY = [
    (Scene(pods=(target(), unscheduled(draft("d0")))), "False Unschedulable"),
    (Scene(pods=(target(), unscheduled(draft("d0"), NO_GPU))), "False InsufficientLocalGPUs"),
    (Scene(pods=(target(), unscheduled(draft("d0"), NO_CPU))), "False Unschedulable"),
    (
        Scene(pods=(target(), unscheduled(draft("d0"), NO_CPU)), spec=CPU_DRAFT),
        "False InsufficientLocalCPUs",
        "1 of 2 drafts have no node; lower draft.replicas or the CPUs of draft.resources, or add "
        f"room: {NO_CPU}",
    ),
    (Scene(pods=(unscheduled(target()), unscheduled(draft("d0")))), "True Sufficient"),
    (Scene(pods=(target(), marked(unscheduled(draft("d0"))))), "True Sufficient"),
    (Scene(cells=2, pods=(target(), unscheduled(draft("d0", cell=1)))), "True Sufficient"),
]


def scaled(mode: ScalingMode, **more: Any) -> Scene:
    return Scene(mode=mode, **more)


DEMAND = Demand(replicas=1, eligible=6.0, sustainable_sessions=2.0)
SCALING = [
    (scaled("Internal", plan=decided(2, "Steady")), "True Internal"),
    (scaled("Internal", plan=decided(2, "NoSamples")), "False NoSamples"),
    (
        scaled("Internal", plan=decided(3, "ScaleUp", demand=DEMAND)),
        "True Internal",
        "The operator sets 3 drafts, 1 to 4 are allowed; 6.0 sequences speculate, "
        "a draft sustains 2 (0.8 of them used).",
    ),
    (
        scaled("Internal", plan=decided(3, "Steady", demand=replace(DEMAND, num_refused=2))),
        "True Internal",
        "(0.8 of them used); refused targets, each counted as one draft: 2.",
    ),
    (
        scaled("Internal", plan=decided(2, "Unschedulable")),
        "True Internal",
        "2 drafts, 1 to 4 are allowed; none is added while one has no node.",
    ),
    (scaled("External"), "True External"),
]
STALE = PassPlan(revisions={"demo-target-0": "r2", "demo-draft-0": "r1"})


def at_stage(stage: Stage) -> Scene:
    """A change of the target whose preflight has this stage."""
    return Scene(plan=replace(STALE, preflight=Preflight(stage, "image nope")))


def drafts_deployment(**condition: Any) -> Scene:
    return Scene(deployments=(deployment("demo-draft-0", **condition),))


def resumed(**numbers: int) -> Scene:
    """The controller of a Deployment of two drafts has not evaluated its progress after a pause."""
    found = deployment("demo-draft-0", status="Unknown", reason="DeploymentResumed")
    counts = {"replicas": 2, "updatedReplicas": 2, "availableReplicas": 2} | numbers
    status = found["status"] | counts
    return Scene(deployments=(found | {"spec": {"replicas": 2}, "status": status},))


def unseen() -> Scene:
    """A Deployment whose controller has not seen its newest template."""
    found = deployment("demo-target-0")
    found["metadata"]["generation"] = 4
    return Scene(deployments=(found,))


def preflight_not_made(cause: Cause) -> Scene:
    """The pod of a preflight was not created."""
    made: Object = {"kind": "Pod", "metadata": {"name": "demo-preflight-r2"}}
    plan = replace(STALE, preflight=Preflight("Running", "it is created", made))
    return Scene(plan=plan, results=refused(ref_of(made), "exceeded quota", cause))


LEFT = {"terminated": {"exitCode": 1, "message": "RuntimeError: no (x.py:1)"}}
CRASHING = {"restartCount": 5, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
CRASHES = draft("d1", ready=False, containerStatuses=[CRASHING | {"lastState": LEFT}])
STUCK = {"status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out."}
PAUSED = Scene(deployments=(deployment("demo-draft-0") | {"spec": {"paused": True}},))
PROGRESS = [
    (Scene(spec={"paused": True}), "False Paused"),
    (at_stage("Failed"), "False PreflightFailed"),
    (at_stage("Stuck"), "False PreflightFailed"),
    (preflight_not_made("Refused"), "False PreflightFailed", "exceeded quota"),
    (preflight_not_made("Forbidden"), "False PreflightFailed", "exceeded quota"),
    (at_stage("Running"), "True Preflight"),
    (at_stage("Passed"), "True RollingOut"),
    (Scene(plan=STALE), "True RollingOut"),
    (unseen(), "True RollingOut"),
    (drafts_deployment(reason="ReplicaSetUpdated"), "True RollingOut"),
    (resumed(), "True UpToDate"),
    (resumed(replicas=3), "True RollingOut"),
    (resumed(updatedReplicas=1), "True RollingOut"),
    (resumed(availableReplicas=1), "True RollingOut"),
    (drafts_deployment(**STUCK), "False ProgressDeadlineExceeded"),
    (
        replace(drafts_deployment(reason="ReplicaSetUpdated"), pods=(*PAIR, CRASHES)),
        "True RollingOut",
        "3 of 3 pods are up to date, 2 of them ready; "
        "d1 ended with exit code 1, 5 restarts so far: RuntimeError: no (x.py:1).",
    ),
    (PAUSED, "False Paused", "demo-draft-0"),
    (replace(PAUSED, results=Results(applied={DRAFTED})), "True UpToDate"),
    (Scene(drafts=1, pods=(*PAIR, marked(draft("d1")))), "True Draining"),
    (Scene(drafts=1, pods=(*PAIR, terminating(draft("d1")))), "True Draining"),
    (Scene(drafts=1, pods=(*PAIR, terminating(draft("d1"), ends_at=NOW - 59))), "True Draining"),
    (Scene(drafts=1, pods=(*PAIR, terminating(draft("d1"), ends_at=NOW - 61))), "True UpToDate"),
    (Scene(drafts=3), "True Scaling"),
    (Scene(cells=2), "True Scaling"),
    (Scene(pods=(terminating(target()), draft("d0"), draft("d1")), plan=STALE), "True RollingOut"),
    (Scene(drafts=2, pods=(*PAIR, unscheduled(draft("d1")))), "True Scaling"),
    (Scene(pods=(target(ready=False), draft("d0"), draft("d1"))), "True Scaling"),
    (AVAILABLE, "True Scaling"),
    (Scene(), "True UpToDate"),
]
VALID = [
    (
        Scene(results=refused(TARGET, "spec.env: Invalid.")),
        "False PodTemplateInvalid",
        "Deployment demo-target-0 was refused: spec.env: Invalid.",
    ),
    (Scene(results=refused(ACCOUNT)), "False ObjectRefused"),
]
OWNED = [
    (
        Scene(facts={"foreign": {SERVICE: "SSDDeployment x", ACCOUNT: "another owner"}}),
        "False NameTaken",
        "Service demo belongs to SSDDeployment x, ServiceAccount demo-draft belongs to another ",
    ),
]
GATED = {"gateway": Gateway(enabled=True, replicas=2)}


def gated(**status: Any) -> Scene:
    """A resource with two wanted gateways, whose Deployment has this status."""
    front = deployment("demo-gateway") | {"status": status}
    return Scene(spec=GATED, deployments=(*Scene().deployments, front))


def fronted(pod: Object) -> Scene:
    """Its only gateway is this pod."""
    return replace(gated(), facts={"gateways": (pod,)})


def front(**status: Any) -> Object:
    return pod("gateway", "g0", ready=False, **status)


GATEWAY = [
    (gated(availableReplicas=2), "True AllReady"),
    (gated(availableReplicas=1), "False Loading"),
    (gated(), "False Loading"),
    (Scene(spec=GATED), "False Loading"),
    (gated(conditions=[{"status": "True"} | FORBIDDEN]), "False PodForbidden"),
    (
        replace(
            gated(availableReplicas=2),
            spec=GATED | {"paused": True},
            facts={"foreign": {BALANCED: "SSDDeployment x"}},
        ),
        "False NameTaken",
        "2 of 2 gateways are ready; Service demo-targets belongs to SSDDeployment x.",
    ),
    (
        fronted(front(containerStatuses=PULL)),
        "False ImagePull",
        "ready; g0 cannot pull x: denied.",
    ),
    (
        fronted(terminating(front())),
        "False Loading",
        "a ready target: see the pods of demo-gateway.",
    ),
]
CASES: Mapping[str, Sequence[tuple[Any, ...]]] = {
    "Ready": READY,
    "TargetReady": TARGETS,
    "DraftReady": DRAFTS,
    "GatewayReady": GATEWAY,
    "SpeculationActive": SPECULATION,
    "DraftCapacity": CAPACITY,
    "ScalingActive": SCALING,
    "Progressing": PROGRESS,
    "SpecValid": VALID,
    "ResourcesOwned": OWNED,
}
"""What a pass has seen and done; the status and reason of a condition, and parts of its message."""


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, cases in CASES.items() for case in cases]
)
def test_each_condition_has_its_status_reason_and_message(kind: str, case: tuple[Any, ...]) -> None:
    scene, expected, *words = case
    found = conditions(scene.result)[kind]
    assert f"{found.status} {found.reason}" == expected
    assert found.message.endswith(".")
    assert [each for each in words if each not in found.message] == []


def test_without_autoscaling_there_is_no_scaling_condition() -> None:
    assert "ScalingActive" not in conditions(Scene(mode="None").result)


def endpoint_slice(service: str, *endpoints: tuple[str, bool | None]) -> Object:
    """A slice with these pods, and whether they are ready."""
    return {
        "metadata": {"labels": {"kubernetes.io/service-name": service}},
        "endpoints": [
            {"targetRef": {"name": pod}, "conditions": {} if ready is None else {"ready": ready}}
            for pod, ready in endpoints
        ],
    }


def test_endpoints_are_the_ready_pods_of_all_slices_of_the_service() -> None:
    slices = [
        endpoint_slice("demo", ("t0", True), ("t1", False)),
        endpoint_slice("demo", ("t2", None)),
        endpoint_slice("other", ("t3", True)),
        endpoint_slice("demo") | {"endpoints": None},
    ]
    assert endpoints_of("demo", slices) == {"t0", "t2"}
