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

from ssd_operator.api.spec import Object, Observability, ScalingMode
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.pod_state import to_text
from ssd_operator.policy.apply_failures import Cause
from ssd_operator.policy.plan import Plan
from ssd_operator.policy.preflight import Preflight
from ssd_operator.policy.rollout import Stage
from ssd_operator.policy.scaling import Reason
from ssd_operator.status.condition_rules import conditions

TWO_TARGETS = (deployment("demo-target-0"), deployment("demo-target-1"))
NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
PULL = [{"image": "x", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]
TOO_SLOW = link("d0", "Refused", reason="link_too_slow: its round trip is 312 us")
TARGET = Ref("Deployment", "demo-target-0")
REFUSED = link("", "Refused", reason="tokenizer_fingerprint: this draft has 1, the target has 2")
HPA = Ref("HorizontalPodAutoscaler", "demo-draft")


def judge(scene: Scene, kind: str) -> tuple[str, str]:
    found = conditions(scene.result)[kind]
    assert found.message.endswith(".")
    return str(found.truth), found.reason


def message(scene: Scene, kind: str) -> str:
    return conditions(scene.result)[kind].message


def test_all_conditions_of_a_healthy_resource_are_true() -> None:
    found = {(kind, each.holds, each.reason) for kind, each in conditions(Scene().result).items()}
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


READY = [
    (Scene(pods=(target(),)), "True", "Serving"),
    (Scene(cells=2), "True", "ServingPartly"),
    (Scene(pods=(target(ready=False),)), "False", "Loading"),
    (Scene(pods=()), "False", "Loading"),
    (Scene(pods=(terminating(target()),)), "False", "Draining"),
    (Scene(facts={"foreign": {Ref("Service", "demo")}}), "False", "NameTaken"),
    (Scene(facts={"foreign": {Ref("ServiceAccount", "demo-draft")}}), "True", "Serving"),
    (
        Scene(pods=(), deployments=(), facts={"foreign": {Ref("ServiceAccount", "demo-target")}}),
        "False",
        "NameTaken",
    ),
    (
        Scene(pods=(), deployments=(), results=refused(TARGET)),
        "False",
        "PodTemplateInvalid",
    ),
    (Scene(results=refused(TARGET)), "True", "Serving"),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), READY)
def test_ready_needs_one_target_and_the_own_service(scene: Scene, truth: str, reason: str) -> None:
    assert judge(scene, "Ready") == (truth, reason)


ROLLING: dict[str, Any] = {"reason": "ReplicaSetUpdated"}
TARGETS = [
    (Scene(cells=2, deployments=TWO_TARGETS), "Loading"),
    (Scene(pods=(unscheduled(target()),)), "Unschedulable"),
    (Scene(pods=(target(ready=False, containerStatuses=PULL),)), "ImagePull"),
    (
        Scene(
            pods=(target(ready=False),),
            deployments=(deployment("demo-target-0", revision=2, **ROLLING),),
        ),
        "RollingOut",
    ),
    (
        Scene(
            pods=(terminating(target()),),
            deployments=(deployment("demo-target-0", revision=2, **ROLLING),),
        ),
        "RollingOut",
    ),
    (
        Scene(
            pods=(target(ready=False),),
            deployments=(deployment("demo-target-0", revision=1, **ROLLING),),
        ),
        "Loading",
    ),
    (
        Scene(
            pods=(),
            deployments=(
                deployment("demo-target-0", type="ReplicaFailure", message="violates restricted"),
            ),
        ),
        "PodForbidden",
    ),
]


@pytest.mark.parametrize(("scene", "reason"), TARGETS)
def test_a_cell_without_a_ready_target_has_a_reason(scene: Scene, reason: str) -> None:
    assert judge(scene, "TargetReady") == ("False", reason)


def test_of_several_cells_the_most_important_reason_is_reported() -> None:
    pods = (target(ready=False), target("t1", ready=False, cell=1, containerStatuses=PULL))
    scene = Scene(cells=2, pods=pods, deployments=TWO_TARGETS)
    assert judge(scene, "TargetReady") == ("False", "ImagePull")
    assert message(scene, "TargetReady") == "0 of 2 targets are ready; t1 cannot pull x: denied."


DRAFTS = [
    (Scene(drafts=0, pods=(target(),)), "True", "ScaledToZero"),
    (Scene(drafts=1, pods=(target(), draft("d0"), marked(draft("d1")))), "True", "AllReady"),
    (Scene(drafts=2, pods=(target(), draft("d0"), marked(draft("d1")))), "False", "Scaling"),
    (Scene(pods=(target(), draft("d0"))), "False", "Scaling"),
    (Scene(pods=(target(), draft("d0"), draft("d1", ready=False))), "False", "Loading"),
    (Scene(pods=(target(), draft("d0"), unscheduled(draft("d1")))), "False", "Unschedulable"),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), DRAFTS)
def test_drafts_are_ready_when_the_wanted_number_accepts_sessions(
    scene: Scene, truth: str, reason: str
) -> None:
    assert judge(scene, "DraftReady") == (truth, reason)


def unanswered_for(ready_seconds: float) -> Scene:
    """A target that has been ready for this long and has not answered."""
    pods = (target(), draft("d0"), draft("d1"))
    pods[0]["status"]["conditions"][0]["lastTransitionTime"] = to_text(NOW - ready_seconds)
    return Scene(pods=pods, pools=())


SPECULATION = [
    (Scene(pods=(target(ready=False),)), "False", "NoDrafts"),
    (Scene(drafts=0), "False", "NoDrafts"),
    (Scene(pools=(answer("t0"),)), "False", "NoDrafts"),
    (Scene(pools=(answer("t0", link("d0", "Lost", reason="gone")),)), "False", "NoDrafts"),
    (Scene(pools=(answer("t0", REFUSED),)), "False", "TokenizerMismatch"),
    (
        Scene(
            pools=(
                answer(
                    "t0", replace(REFUSED, reason="vocab_size: this draft has 1, the target has 2")
                ),
            )
        ),
        "False",
        "VocabularyMismatch",
    ),
    (
        Scene(
            pools=(
                answer(
                    "t0",
                    replace(REFUSED, reason="wire_version: this draft has 1, the target has 2"),
                ),
            )
        ),
        "False",
        "WireVersionMismatch",
    ),
    (
        Scene(pools=(answer("t0", link("d0", "Quarantined", reason="late")),)),
        "False",
        "Quarantined",
    ),
    (Scene(pools=(answer("t0", TOO_SLOW),)), "False", "LinkTooSlow"),
    (Scene(pools=(answer("t0", TOO_SLOW, link("d1")),)), "True", "Active"),
    (Scene(pools=(answer("t0", REFUSED, link("d1")),)), "True", "Active"),
    (Scene(pools=(answer("t0", link("d0"), age=31),)), "Unknown", "TargetUnreachable"),
    (unanswered_for(31), "Unknown", "TargetUnreachable"),
    (unanswered_for(29), "False", "NoDrafts"),
    (
        Scene(cells=2, pods=(target(), target("t1", cell=1), draft("d0"))),
        "Unknown",
        "TargetUnreachable",
    ),
    (
        Scene(
            cells=2,
            pods=(target(), target("t1", cell=1), draft("d0")),
            pools=(answer("t1", REFUSED),),
        ),
        "False",
        "TokenizerMismatch",
    ),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), SPECULATION)
def test_speculation_is_active_when_each_serving_target_has_a_link(
    scene: Scene, truth: str, reason: str
) -> None:
    assert judge(scene, "SpeculationActive") == (truth, reason)


def test_the_message_of_a_slow_link_has_its_numbers() -> None:
    assert message(Scene(pools=(answer("t0", TOO_SLOW),)), "SpeculationActive") == (
        "t0 and d0: its round trip is 312 us (transport.maxRoundTripMicroseconds)."
    )


CAPACITY = [
    (Scene(pods=(target(), unscheduled(draft("d0")))), "False", "Unschedulable"),
    (Scene(pods=(target(), unscheduled(draft("d0"), NO_GPU))), "False", "InsufficientLocalGPUs"),
    (Scene(pods=(unscheduled(target()), unscheduled(draft("d0")))), "True", "Sufficient"),
    (Scene(pods=(target(), marked(unscheduled(draft("d0"))))), "True", "Sufficient"),
    (Scene(cells=2, pods=(target(), unscheduled(draft("d0", cell=1)))), "True", "Sufficient"),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), CAPACITY)
def test_a_draft_without_a_node_is_reported_once_its_target_has_one(
    scene: Scene, truth: str, reason: str
) -> None:
    assert judge(scene, "DraftCapacity") == (truth, reason)


def hpa(**condition: str) -> Object:
    return {"children": {HPA: {"status": {"conditions": [{"type": "ScalingActive", **condition}]}}}}


STEADY, BLIND = decided(2, Reason.STEADY), decided(2, Reason.NO_SAMPLES)
NO_ADAPTER = {"status": "False", "reason": "FailedGetExternalMetric", "message": "no adapter."}
SCALING = [
    (Scene(mode=ScalingMode.INTERNAL, plan=STEADY), "True", "Internal"),
    (Scene(mode=ScalingMode.INTERNAL, plan=BLIND), "False", "NoSamples"),
    (Scene(mode=ScalingMode.EXTERNAL), "True", "External"),
    (Scene(mode=ScalingMode.KEDA), "False", "KEDANotInstalled"),
    (
        Scene(mode=ScalingMode.KEDA, facts={"kinds": {"ScaledObject"}}),
        "Unknown",
        "NoSamples",
    ),
    (Scene(mode=ScalingMode.HPA), "Unknown", "NoSamples"),
    (
        Scene(
            mode=ScalingMode.HPA,
            facts=hpa(status="True", reason="ValidMetricFound", message="ok."),
        ),
        "True",
        "ValidMetricFound",
    ),
    (
        Scene(mode=ScalingMode.HPA, facts=hpa(**NO_ADAPTER)),
        "False",
        "FailedGetExternalMetric",
    ),
    (
        Scene(mode=ScalingMode.HPA, min_replicas=0, results=refused(HPA, "must be > 0.")),
        "False",
        "ScaleToZeroUnsupported",
    ),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), SCALING)
def test_the_condition_of_the_scaler_is_reported(scene: Scene, truth: str, reason: str) -> None:
    assert judge(scene, "ScalingActive") == (truth, reason)


@pytest.mark.parametrize("mode", [None, ScalingMode.NONE])
def test_without_autoscaling_there_is_no_scaling_condition(mode: ScalingMode | None) -> None:
    assert "ScalingActive" not in conditions(Scene(mode=mode).result)


STALE = Plan(revisions={"demo-target-0": "r2", "demo-draft-0": "r1"})
STUCK: dict[str, Any] = {
    "status": "False",
    "reason": "ProgressDeadlineExceeded",
    "message": "timed out.",
}


def at_stage(stage: Stage) -> Plan:
    """A change of the target whose preflight has this stage."""
    return replace(STALE, preflight=Preflight(stage, "image nope"))


PROGRESS = [
    (Scene(spec={"paused": True}), "False", "Paused"),
    (Scene(plan=at_stage(Stage.FAILED)), "False", "PreflightFailed"),
    (Scene(plan=at_stage(Stage.STUCK)), "False", "PreflightFailed"),
    (Scene(plan=at_stage(Stage.RUNNING)), "True", "Preflight"),
    (Scene(plan=at_stage(Stage.PASSED)), "True", "RollingOut"),
    (Scene(plan=STALE), "True", "RollingOut"),
    (Scene(deployments=(deployment("demo-draft-0", **ROLLING),)), "True", "RollingOut"),
    (
        Scene(deployments=(deployment("demo-draft-0", **STUCK),)),
        "False",
        "ProgressDeadlineExceeded",
    ),
    (Scene(drafts=1, pods=(target(), draft("d0"), marked(draft("d1")))), "True", "Draining"),
    (Scene(drafts=1, pods=(target(), draft("d0"), terminating(draft("d1")))), "True", "Draining"),
    (Scene(drafts=3), "True", "Scaling"),
    (Scene(cells=2), "True", "Scaling"),
    (
        Scene(pods=(terminating(target()), draft("d0"), draft("d1")), plan=STALE),
        "True",
        "RollingOut",
    ),
    (Scene(drafts=2, pods=(target(), draft("d0"), unscheduled(draft("d1")))), "True", "Scaling"),
    (Scene(pods=(target(ready=False), draft("d0"), draft("d1"))), "True", "Scaling"),
    (Scene(), "True", "UpToDate"),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), PROGRESS)
def test_a_change_in_progress_is_reported(scene: Scene, truth: str, reason: str) -> None:
    assert judge(scene, "Progressing") == (truth, reason)


def test_a_deployment_that_is_available_without_a_ready_pod_does_not_count() -> None:
    available = {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"}
    draft_deployment = deployment("demo-draft-0")
    draft_deployment["status"]["conditions"].append(available)
    pods = (target(), draft("d0", ready=False))
    deployments = (deployment("demo-target-0"), draft_deployment)
    scene = Scene(drafts=1, pods=pods, deployments=deployments, pools=())
    assert judge(scene, "DraftReady") == ("False", "Loading")
    assert judge(scene, "Progressing") == ("True", "Scaling")


def test_a_deployment_that_has_not_seen_its_newest_template_is_rolling() -> None:
    unseen = deployment("demo-target-0")
    unseen["metadata"]["generation"] = 4
    assert judge(Scene(deployments=(unseen,)), "Progressing") == ("True", "RollingOut")


def test_the_error_of_the_api_server_is_quoted() -> None:
    scene = Scene(results=refused(TARGET, "spec.containers[0].env: Invalid."))
    assert judge(scene, "SpecValid") == ("False", "PodTemplateInvalid")
    expected = "Deployment demo-target-0 was refused: spec.containers[0].env: Invalid."
    assert message(scene, "SpecValid") == expected


def test_an_hpa_that_was_refused_for_zero_replicas_leaves_the_spec_valid() -> None:
    scene = Scene(mode=ScalingMode.HPA, min_replicas=0, results=refused(HPA, "must be > 0."))
    assert judge(scene, "SpecValid") == ("True", "Valid")
    assert judge(replace(scene, min_replicas=1), "SpecValid") == ("False", "ObjectRefused")


def test_an_invalid_spec_and_a_missing_api_are_reported() -> None:
    reserved = {"spec_problem": ("ReservedEnv", "SSD_TARGET_MODEL is reserved.")}
    assert judge(Scene(facts=reserved), "SpecValid") == ("False", "ReservedEnv")
    scene = Scene(spec={"observability": Observability(pod_monitor=True)})
    assert judge(scene, "SpecValid") == ("False", "OptionalAPIMissing")
    served = replace(scene, facts={"kinds": {"PodMonitor"}})
    assert judge(served, "SpecValid") == ("True", "Valid")


def test_foreign_objects_are_reported() -> None:
    scene = Scene(facts={"foreign": {Ref("Service", "demo"), Ref("ServiceAccount", "demo-draft")}})
    assert judge(scene, "ResourcesOwned") == ("False", "NameTaken")
    assert "Service demo, ServiceAccount demo-draft" in message(scene, "ResourcesOwned")


def test_pods_of_other_components_are_ignored() -> None:
    scene = Scene(pods=(pod("gateway", "g0"), unscheduled(target())))
    assert judge(scene, "Ready") == ("False", "Unschedulable")


def test_a_preflight_whose_pod_was_refused_or_forbidden_has_failed() -> None:
    made: Object = {"kind": "Pod", "metadata": {"name": "demo-preflight-r2"}}
    plan = replace(STALE, preflight=Preflight(Stage.RUNNING, "it is created", made))
    ref = Ref("Pod", "demo-preflight-r2")
    for cause in (Cause.REFUSED, Cause.FORBIDDEN):
        scene = Scene(plan=plan, results=refused(ref, "exceeded quota", cause))
        assert judge(scene, "Progressing") == ("False", "PreflightFailed")
        assert "exceeded quota" in message(scene, "Progressing")
