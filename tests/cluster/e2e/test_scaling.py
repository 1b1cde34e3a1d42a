"""Scalers of the drafts."""

from collections.abc import Mapping, Sequence

import pytest
import yaml
from tests.cluster.kube import CHART, Kube, Object, eventually, sample
from tests.cluster.load import Job, Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]


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


def test_the_hpa_of_the_samples_writes_the_number_of_drafts(kube: Kube) -> None:
    hpa = yaml.safe_load((CHART / "samples" / "scaling" / "hpa.yaml").read_text())
    demo = scaled("demo", mode="External")

    def replicas() -> int:
        return int(kube.get("ssd", "demo")["spec"]["draft"]["replicas"])

    with kube.applied(demo):
        kube.apply(hpa)
        kube.wait_for("demo", "ScalingActive", "True", "External")
        # Without an adapter of metrics it still enforces its minimum.
        eventually(lambda: replicas() == hpa["spec"]["minReplicas"], "the HPA scales", 90)
        kube.wait_linked("demo", 2)
        found = kube.get("hpa", "demo-draft")["status"]["conditions"]
        states = {each["type"]: each["status"] for each in found}
        assert states["AbleToScale"] == "True"
        kube("delete", "hpa", "demo-draft")


def test_a_draft_without_a_node_is_pending_and_reported(kube: Kube) -> None:
    document = sample("tight", drafts=1)
    document["spec"]["draft"]["resources"] = {"requests": {"cpu": "64"}}
    with kube.applied(document):
        kube.wait_for("tight", "DraftCapacity", "False")
        assert kube.get("ssd", "tight")["status"]["draft"]["pendingReplicas"] == 1
        kube.wait_ready("tight")
