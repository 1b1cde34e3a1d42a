"""Scalers of the drafts, and the conditions of a cluster without them."""

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


def test_the_internal_loop_follows_a_step_of_load_without_failed_requests(
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
        figures["load ended: 1 draft left, s (window 15 s)"] = round(down, 1)
        status = kube.get("ssd", "step")["status"]
        assert status["draft"]["lastScaleReason"] == "ScaleDown"
        found = kube.condition("step", "ScalingActive")
        assert (found["status"], found["reason"]) == ("True", "Internal")
    finally:
        kube("delete", "ssd", "step")


def test_an_hpa_without_a_metrics_adapter_is_reported(kube: Kube) -> None:
    kube.apply(scaled("hpa", mode="HPA"))
    try:

        def is_reported() -> bool:
            found = kube.condition("hpa", "ScalingActive")
            return bool(found.get("status") == "False" and found["reason"].startswith("FailedGet"))

        eventually(is_reported, "the condition is that of the HPA", 90)
        scaler = kube.get("hpa", "hpa-draft")["spec"]["scaleTargetRef"]
        assert (scaler["kind"], scaler["name"]) == ("SSDDeployment", "hpa")
    finally:
        kube("delete", "ssd", "hpa")


def test_missing_keda_is_reported(kube: Kube) -> None:
    kube.apply(scaled("keda", mode="KEDA", keda={"serverAddress": "http://prometheus:9090"}))
    try:

        def is_reported() -> bool:
            found = kube.condition("keda", "ScalingActive")
            return bool(found.get("reason") == "KEDANotInstalled")

        eventually(is_reported, "the condition reports it", 60)
        assert kube.get("ssd", "keda")["spec"]["draft"]["replicas"] == 1
    finally:
        kube("delete", "ssd", "keda")


def test_a_draft_without_a_node_is_pending_and_reported(kube: Kube) -> None:
    document = sample("tight", drafts=1)
    document["spec"]["draft"]["resources"] = {"requests": {"cpu": "64"}}
    kube.apply(document)
    try:

        def is_reported() -> bool:
            draft = kube.get("ssd", "tight")["status"]["draft"]
            return bool(
                kube.condition("tight", "DraftCapacity").get("status") == "False"
                and draft["pendingReplicas"] == 1
            )

        eventually(is_reported, "the condition reports it", 60)
        kube.wait_ready("tight")
    finally:
        kube("delete", "ssd", "tight")
