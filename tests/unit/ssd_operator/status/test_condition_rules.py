from dataclasses import replace
from typing import Any

import pytest
from tests.unit.ssd_operator.scenes import (
    NOW,
    Scene,
    answer,
    deployment,
    draft,
    homeless,
    leaving,
    link,
    marked,
    pod,
    target,
)

from ssd_operator.api.spec import Object, Observability, ScalingMode
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.pod_state import to_text
from ssd_operator.policy.preflight import Preflight
from ssd_operator.policy.rollout import Stage
from ssd_operator.policy.scaling import Decision, Reason
from ssd_operator.policy.snapshot import Planned
from ssd_operator.status.condition_rules import verdicts

TWO_TARGETS = (deployment("demo-target-0"), deployment("demo-target-1"))
NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
PULL = [{"image": "x", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]
TOO_SLOW = link("d0", "Refused", reason="link_too_slow: its round trip is 312 us")
REFUSED = link("", "Refused", reason="tokenizer_fingerprint: this draft has 1, the target said 2")
HPA = Ref("HorizontalPodAutoscaler", "demo-draft")


def judge(scene: Scene, kind: str) -> tuple[str, str]:
    (found,) = [verdict for verdict in verdicts(scene.snapshot) if verdict.kind == kind]
    assert found.message
    return str(found.truth), found.reason


def words(scene: Scene, kind: str) -> str:
    return next(verdict.message for verdict in verdicts(scene.snapshot) if verdict.kind == kind)


def test_all_is_well() -> None:
    found = {
        (verdict.kind, verdict.holds, verdict.reason) for verdict in verdicts(Scene().snapshot)
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


READY = [
    (Scene(pods=(target(),)), "True", "Serving"),
    (Scene(cells=2), "True", "ServingPartly"),
    (Scene(pods=(target(ready=False),)), "False", "Loading"),
    (Scene(pods=()), "False", "Loading"),
    (Scene(pods=(leaving(target()),)), "False", "Draining"),
    (Scene(facts={"foreign": {Ref("Service", "demo")}}), "False", "NameTaken"),
    (Scene(facts={"foreign": {Ref("ServiceAccount", "demo-draft")}}), "True", "Serving"),
    (
        Scene(pods=(), deployments=(), facts={"foreign": {Ref("ServiceAccount", "demo-target")}}),
        "False",
        "NameTaken",
    ),
    (
        Scene(
            pods=(), deployments=(), facts={"rejected": {Ref("Deployment", "demo-target-0"): "no"}}
        ),
        "False",
        "PodTemplateInvalid",
    ),
    (Scene(facts={"rejected": {Ref("Deployment", "demo-target-0"): "no"}}), "True", "Serving"),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), READY)
def test_ready_is_one_target_behind_our_own_endpoint(scene: Scene, truth: str, reason: str) -> None:
    assert judge(scene, "Ready") == (truth, reason)


ROLLING: dict[str, Any] = {"reason": "ReplicaSetUpdated"}
TARGETS = [
    (Scene(cells=2, deployments=TWO_TARGETS), "Loading"),
    (Scene(pods=(homeless(target()),)), "Unschedulable"),
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
            pods=(leaving(target()),),
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
def test_a_cell_without_a_target_says_why(scene: Scene, reason: str) -> None:
    assert judge(scene, "TargetReady") == ("False", reason)


def test_of_several_cells_the_one_that_needs_a_person_is_told() -> None:
    pods = (target(ready=False), target("t1", ready=False, cell=1, containerStatuses=PULL))
    scene = Scene(cells=2, pods=pods, deployments=TWO_TARGETS)
    assert judge(scene, "TargetReady") == ("False", "ImagePull")
    assert words(scene, "TargetReady") == "0 of 2 targets are ready; t1 cannot pull x: denied."


DRAFTS = [
    (Scene(drafts=0, pods=(target(),)), "True", "ScaledToZero"),
    (Scene(drafts=1, pods=(target(), draft("d0"), marked(draft("d1")))), "True", "AllReady"),
    (Scene(drafts=2, pods=(target(), draft("d0"), marked(draft("d1")))), "False", "Scaling"),
    (Scene(pods=(target(), draft("d0"))), "False", "Scaling"),
    (Scene(pods=(target(), draft("d0"), draft("d1", ready=False))), "False", "Loading"),
    (Scene(pods=(target(), draft("d0"), homeless(draft("d1")))), "False", "Unschedulable"),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), DRAFTS)
def test_drafts_are_ready_when_as_many_as_wanted_take_sessions(
    scene: Scene, truth: str, reason: str
) -> None:
    assert judge(scene, "DraftReady") == (truth, reason)


def silent(ready_seconds: float) -> Scene:
    """A target that has been ready for so long, and has not answered yet."""
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
        Scene(pools=(answer("t0", replace(REFUSED, reason="vocab_size: 1, 2")),)),
        "False",
        "VocabularyMismatch",
    ),
    (
        Scene(pools=(answer("t0", replace(REFUSED, reason="wire_version: 1, 2")),)),
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
    (silent(31), "Unknown", "TargetUnreachable"),
    (silent(29), "False", "NoDrafts"),
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


def test_a_link_that_is_too_slow_is_told_with_its_numbers() -> None:
    assert words(Scene(pools=(answer("t0", TOO_SLOW),)), "SpeculationActive") == (
        "t0 and d0: its round trip is 312 us (transport.maxRoundTripMicroseconds)."
    )


CAPACITY = [
    (Scene(pods=(target(), homeless(draft("d0")))), "False", "Unschedulable"),
    (Scene(pods=(target(), homeless(draft("d0"), NO_GPU))), "False", "InsufficientLocalGPUs"),
    (Scene(pods=(homeless(target()), homeless(draft("d0")))), "True", "Sufficient"),
    (Scene(pods=(target(), marked(homeless(draft("d0"))))), "True", "Sufficient"),
    (Scene(cells=2, pods=(target(), homeless(draft("d0", cell=1)))), "True", "Sufficient"),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), CAPACITY)
def test_a_draft_lacks_room_once_its_target_is_placed(
    scene: Scene, truth: str, reason: str
) -> None:
    assert judge(scene, "DraftCapacity") == (truth, reason)


def hpa(**condition: str) -> Object:
    return {"children": {HPA: {"status": {"conditions": [{"type": "ScalingActive", **condition}]}}}}


STEADY = Planned(decision=Decision(replicas=2, reason=Reason.STEADY))
BLIND = Planned(decision=Decision(replicas=2, reason=Reason.NO_SAMPLES))
NO_ADAPTER = {"status": "False", "reason": "FailedGetExternalMetric", "message": "no adapter"}
SCALING = [
    (Scene(mode=ScalingMode.INTERNAL, planned=STEADY), "True", "Internal"),
    (Scene(mode=ScalingMode.INTERNAL, planned=BLIND), "False", "NoSamples"),
    (Scene(mode=ScalingMode.EXTERNAL), "True", "External"),
    (Scene(mode=ScalingMode.KEDA), "False", "KEDANotInstalled"),
    (
        Scene(mode=ScalingMode.KEDA, facts={"optional_apis": {"ScaledObject"}}),
        "Unknown",
        "NoSamples",
    ),
    (Scene(mode=ScalingMode.HPA), "Unknown", "NoSamples"),
    (
        Scene(mode=ScalingMode.HPA, facts=hpa(status="True", reason="ValidMetricFound")),
        "True",
        "ValidMetricFound",
    ),
    (
        Scene(mode=ScalingMode.HPA, facts=hpa(**NO_ADAPTER)),
        "False",
        "FailedGetExternalMetric",
    ),
    (
        Scene(mode=ScalingMode.HPA, min_replicas=0, facts={"rejected": {HPA: "must be > 0"}}),
        "False",
        "ScaleToZeroUnsupported",
    ),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), SCALING)
def test_whoever_scales_is_judged_by_its_own_word(scene: Scene, truth: str, reason: str) -> None:
    assert judge(scene, "ScalingActive") == (truth, reason)


@pytest.mark.parametrize("mode", [None, ScalingMode.NONE])
def test_a_fixed_number_has_no_scaler_to_judge(mode: ScalingMode | None) -> None:
    kinds = {verdict.kind for verdict in verdicts(Scene(mode=mode).snapshot)}
    assert "ScalingActive" not in kinds


STALE = Planned(revisions={"demo-target-0": "r2", "demo-draft-0": "r1"})
STUCK: dict[str, Any] = {
    "status": "False",
    "reason": "ProgressDeadlineExceeded",
    "message": "timed out",
}


def tried(stage: Stage) -> Planned:
    """A change of the target of which a preflight is this far."""
    return replace(STALE, preflight=Preflight(stage, "image nope"))


PROGRESS = [
    (Scene(spec={"paused": True}), "False", "Paused"),
    (Scene(planned=tried(Stage.FAILED)), "False", "PreflightFailed"),
    (Scene(planned=tried(Stage.STUCK)), "False", "PreflightFailed"),
    (Scene(planned=tried(Stage.RUNNING)), "True", "Preflight"),
    (Scene(planned=tried(Stage.PASSED)), "True", "RollingOut"),
    (Scene(planned=STALE), "True", "RollingOut"),
    (Scene(deployments=(deployment("demo-draft-0", **ROLLING),)), "True", "RollingOut"),
    (
        Scene(deployments=(deployment("demo-draft-0", **STUCK),)),
        "False",
        "ProgressDeadlineExceeded",
    ),
    (Scene(drafts=1, pods=(target(), draft("d0"), marked(draft("d1")))), "True", "Draining"),
    (Scene(drafts=1, pods=(target(), draft("d0"), leaving(draft("d1")))), "True", "Draining"),
    (Scene(drafts=3), "True", "Scaling"),
    (Scene(cells=2), "True", "Scaling"),
    (
        Scene(pods=(leaving(target()), draft("d0"), draft("d1")), planned=STALE),
        "True",
        "RollingOut",
    ),
    (Scene(drafts=2, pods=(target(), draft("d0"), homeless(draft("d1")))), "True", "Scaling"),
    (Scene(pods=(target(ready=False), draft("d0"), draft("d1"))), "True", "Scaling"),
    (Scene(), "True", "UpToDate"),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), PROGRESS)
def test_what_is_under_way_is_told(scene: Scene, truth: str, reason: str) -> None:
    assert judge(scene, "Progressing") == (truth, reason)


def test_a_deployment_that_calls_itself_available_without_a_ready_pod_is_not_believed() -> None:
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


def test_what_a_schema_cannot_say_is_told_in_the_api_servers_words() -> None:
    ref = Ref("Deployment", "demo-target-0")
    scene = Scene(facts={"rejected": {ref: "spec.containers[0].env: Invalid"}})
    assert judge(scene, "SpecValid") == ("False", "PodTemplateInvalid")
    expected = "Deployment demo-target-0 was refused: spec.containers[0].env: Invalid"
    assert words(scene, "SpecValid") == expected


def test_an_hpa_refused_for_zero_is_no_fault_of_the_spec() -> None:
    scene = Scene(mode=ScalingMode.HPA, min_replicas=0, facts={"rejected": {HPA: "must be > 0"}})
    assert judge(scene, "SpecValid") == ("True", "Valid")
    assert judge(replace(scene, min_replicas=1), "SpecValid") == ("False", "ObjectRefused")


def test_a_problem_of_the_spec_and_a_missing_api_are_named() -> None:
    reserved = {"spec_problem": ("ReservedEnv", "SSD_TARGET_MODEL is ours.")}
    assert judge(Scene(facts=reserved), "SpecValid") == ("False", "ReservedEnv")
    scene = Scene(spec={"observability": Observability(pod_monitor=True)})
    assert judge(scene, "SpecValid") == ("False", "OptionalAPIMissing")
    served = replace(scene, facts={"optional_apis": {"PodMonitor"}})
    assert judge(served, "SpecValid") == ("True", "Valid")


def test_foreign_objects_are_named() -> None:
    scene = Scene(facts={"foreign": {Ref("Service", "demo"), Ref("ServiceAccount", "demo-draft")}})
    assert judge(scene, "ResourcesOwned") == ("False", "NameTaken")
    assert "Service demo, ServiceAccount demo-draft" in words(scene, "ResourcesOwned")


def test_a_pod_of_another_component_is_nobody() -> None:
    scene = Scene(pods=(pod("gateway", "g0"), homeless(target())))
    assert judge(scene, "Ready") == ("False", "Unschedulable")
