"""Scalers of the drafts, and the conditions of a cluster without them."""

from collections.abc import Mapping, Sequence

import pytest
from tests.cluster.kube import Kube, Object, sample
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
    with kube.applied(document):
        kube.wait_ready("step")
        kube.wait_linked("step", 1)
        with Load(kube.endpoint("step"), expected) as load:
            up = kube.wait_linked("step", 3, timeout=180)
            load.go_on(8)
        down = kube.wait_linked("step", 1, timeout=180)
        load.assert_undisturbed()
        figures["load step: 3 drafts linked, s"] = round(up, 1)
        figures["load ended: 1 draft left, s (window 15 s)"] = round(down, 1)
        assert kube.get("ssd", "step")["status"]["draft"]["lastScaleReason"] == "ScaleDown"
        assert kube.has("step", "ScalingActive", "True", "Internal")


KEDA = {"serverAddress": "http://prometheus:9090"}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (scaled("hpa", mode="HPA"), "FailedGet"),
        (scaled("keda", mode="KEDA", keda=KEDA), "KEDANotInstalled"),
    ],
    ids=["hpa", "keda"],
)
def test_a_missing_metrics_adapter_and_missing_keda_are_reported(
    kube: Kube, document: Object, reason: str
) -> None:
    with kube.applied(document) as name:
        kube.wait_for(name, "ScalingActive", "False", reason, timeout=90)
        assert kube.get("ssd", name)["spec"]["draft"]["replicas"] == 1


def test_a_draft_without_a_node_is_pending_and_reported(kube: Kube) -> None:
    document = sample("tight", drafts=1)
    document["spec"]["draft"]["resources"] = {"requests": {"cpu": "64"}}
    with kube.applied(document):
        kube.wait_for("tight", "DraftCapacity", "False")
        assert kube.get("ssd", "tight")["status"]["draft"]["pendingReplicas"] == 1
        kube.wait_ready("tight")
