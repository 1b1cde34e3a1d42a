"""Who decides on the number of drafts, and what a cluster without that somebody says."""

from collections.abc import Mapping, Sequence

import pytest
from tests.cluster.kube import Kube, Object, eventually, sample
from tests.cluster.load import Job, Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def scaled(name: str, **autoscaling: object) -> Object:
    document = sample(name, drafts=1)
    draft = document["spec"]["draft"]
    del draft["replicas"]
    draft["autoscaling"] = {"minReplicas": 1, "maxReplicas": 3, **autoscaling}
    return document


def test_the_internal_loop_follows_a_step_of_load_and_fails_nobody(
    kube: Kube, expected: Mapping[Job, Sequence[int]], figures: dict[str, object]
) -> None:
    document = scaled("step", mode="Internal", scaleDownStabilizationSeconds=15, cooldownSeconds=5)
    document["spec"]["draft"]["sequencesPerReplica"] = 2
    kube.apply(document)
    try:
        kube.wait_ready("step")
        kube.wait_linked("step", 1)
        with Load(kube.endpoint("step"), expected) as load:
            up = kube.wait_linked("step", 3, timeout=180)
            load.go_on(8)
        down = kube.wait_linked("step", 1, timeout=180)
        load.assert_undisturbed()
        figures["load step: 3 drafts linked, s"] = round(up, 1)
        figures["load gone: 1 draft left, s (window 15 s)"] = round(down, 1)
        status = kube.get("ssd", "step")["status"]
        assert status["draft"]["lastScaleReason"] == "ScaleDown"
        said = kube.condition("step", "ScalingActive")
        assert (said["status"], said["reason"]) == ("True", "Internal")
    finally:
        kube("delete", "ssd", "step")


def test_an_hpa_without_a_metrics_adapter_is_told_of(kube: Kube) -> None:
    kube.apply(scaled("hpa", mode="HPA"))
    try:

        def is_said() -> bool:
            said = kube.condition("hpa", "ScalingActive")
            return bool(said.get("status") == "False" and said["reason"].startswith("FailedGet"))

        eventually(is_said, "the HPA's own words are in the condition", 90)
        scaler = kube.get("hpa", "hpa-draft")["spec"]["scaleTargetRef"]
        assert (scaler["kind"], scaler["name"]) == ("SSDDeployment", "hpa")
    finally:
        kube("delete", "ssd", "hpa")


def test_keda_that_is_not_installed_is_told_of(kube: Kube) -> None:
    kube.apply(scaled("keda", mode="KEDA", keda={"serverAddress": "http://prometheus:9090"}))
    try:

        def is_said() -> bool:
            said = kube.condition("keda", "ScalingActive")
            return bool(said.get("reason") == "KEDANotInstalled")

        eventually(is_said, "it is said", 60)
        assert kube.get("ssd", "keda")["spec"]["draft"]["replicas"] == 1
    finally:
        kube("delete", "ssd", "keda")


def test_a_draft_that_finds_no_room_is_pending_and_no_capacity(kube: Kube) -> None:
    document = sample("tight", drafts=1)
    document["spec"]["draft"]["resources"] = {"requests": {"cpu": "64"}}
    kube.apply(document)
    try:

        def is_said() -> bool:
            draft = kube.get("ssd", "tight")["status"]["draft"]
            return bool(
                kube.condition("tight", "DraftCapacity").get("status") == "False"
                and draft["pendingReplicas"] == 1
            )

        eventually(is_said, "the condition says it", 60)
        kube.wait_ready("tight")
    finally:
        kube("delete", "ssd", "tight")
