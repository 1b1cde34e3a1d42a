"""The operator restores its own objects and does not change those of others."""

import re

import pytest
from tests.cluster.kube import Kube, eventually, sample

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
EXTRA_KEY = '[{"op": "add", "path": "/spec/selector/extra", "value": "x"}]'


def test_a_deleted_child_is_created_again(kube: Kube, demo: str) -> None:
    uid = kube.get("service", demo)["metadata"]["uid"]
    kube("annotate", "service", f"{demo}-draft-0", "example.com/note=mine", "--overwrite")
    kube("delete", "service", demo, "--wait=false")
    eventually(lambda: bool(kube.get("service", demo)["metadata"]["uid"] != uid), "it is back", 15)
    annotations = kube.get("service", f"{demo}-draft-0")["metadata"]["annotations"]
    assert annotations["example.com/note"] == "mine", "annotations of others stay"


def test_manual_edits_of_and_additions_to_a_child_are_reverted(
    kube: Kube, demo: str, figures: dict[str, object]
) -> None:
    kube.wait_ready(demo)
    kube.wait_linked(demo, 1)
    drafts = f"{demo}-draft-0"
    port = '{"spec":{"ports":[{"name":"grpc","port":1234,"targetPort":50051}]}}'
    kube("scale", "deployment", drafts, "--replicas=5")
    kube("patch", "service", demo, "--type=merge", "-p", port)
    kube("label", "networkpolicy", f"{demo}-draft", "ssd.dev/name-", "app.kubernetes.io/name-")
    kube("rollout", "pause", f"deployment/{drafts}")
    kube("set", "env", f"deployment/{drafts}", "EXTRA=1")
    kube("patch", "service", demo, "--type=json", "-p", EXTRA_KEY)

    def is_restored() -> bool:
        spec = kube.get("deployment", drafts)["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        is_added = "EXTRA" in {each["name"] for each in container["env"]}
        service = kube.get("service", demo)["spec"]
        labels = kube.get("networkpolicy", f"{demo}-draft")["metadata"]["labels"]
        assert spec["replicas"] == 1
        assert service["ports"][0]["port"] == 50051
        assert "ssd.dev/name" in labels
        return not (spec.get("paused") or is_added or "extra" in service["selector"])

    seconds = eventually(is_restored, "all edits are reverted", 30)
    figures["manual edits reverted, s"] = round(seconds, 1)
    kube.wait_ready(demo)
    kube.wait_for(demo, "Progressing", "True", "UpToDate")


def test_ready_is_false_while_the_service_has_no_endpoint(kube: Kube, demo: str) -> None:
    kube.wait_ready(demo)
    kube.edit_spec(demo, paused=True)  # so that the operator does not restore the selector
    kube("patch", "service", demo, "--type=json", "-p", EXTRA_KEY)
    try:
        kube.wait_for(demo, "Ready", "False", "EndpointMissing", timeout=15)
    finally:
        kube.edit_spec(demo, paused=False)
    kube.wait_for(demo, "Ready", "True", timeout=15)


FAILING = """import os
def fail(*_):
    raise RuntimeError("no bf16 here")
os.sched_setaffinity = fail
"""
"""The interpreter imports it at start; a call of the step thread then raises an unusual error."""


def test_condition_and_event_quote_the_error_of_a_crash(kube: Kube) -> None:
    broken = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "broken"}}
    kube.apply(broken | {"data": {"sitecustomize.py": FAILING}})
    document = sample("crash", drafts=0)
    document["spec"]["podTemplate"] = {
        "env": [{"name": "PYTHONPATH", "value": "/broken:/app"}],
        "volumes": [{"name": "broken", "configMap": {"name": "broken"}}],
        "volumeMounts": [{"name": "broken", "mountPath": "/broken"}],
    }
    quoted = re.compile(r"RuntimeError: no bf16 here \(ssd/\S+\.py:\d+\)")
    with kube.applied(document):
        kube.wait_for("crash", "TargetReady", "False", "CrashLoop", "no bf16 here", timeout=90)
        assert quoted.search(kube.condition("crash", "TargetReady")["message"])
        events = kube.items("events", "--field-selector", "involvedObject.name=crash")
        messages = [each["message"] for each in events if each["reason"] == "CrashLoop"]
        assert messages
        assert all(quoted.search(each) for each in messages), messages
    kube("delete", "configmap", "broken")


def test_a_deployment_that_is_deleted_without_its_pods_adopts_them_again(
    kube: Kube, demo: str
) -> None:
    kube.wait_ready(demo)
    pods = kube.uids(demo, "target")
    uid = kube.get("deployment", f"{demo}-target-0")["metadata"]["uid"]
    kube("delete", "deployment", f"{demo}-target-0", "--cascade=orphan")

    def is_adopted() -> bool:
        found = kube.get("deployment", f"{demo}-target-0")
        is_new = found["metadata"]["uid"] != uid
        return is_new and bool(found.get("status", {}).get("readyReplicas"))

    eventually(is_adopted, "a new Deployment has the pod", 20)
    kube("annotate", "ssd", demo, "example.com/look=again", "--overwrite")
    kube.wait_for(demo, "Ready", "True", timeout=20)
    assert kube.uids(demo, "target") == pods


def test_a_foreign_object_is_reported_and_not_changed(kube: Kube) -> None:
    kube("create", "service", "clusterip", "taken", "--tcp=1:1")
    with kube.applied(sample("taken", drafts=1)):
        kube.wait_for("taken", "ResourcesOwned", "False", "NameTaken", "taken")
        assert kube.has("taken", "Ready", "False")
        assert kube.get("service", "taken")["spec"]["ports"][0]["port"] == 1
        assert kube.pods("taken", "target") == []
        kube("delete", "service", "taken")
        kube.wait_ready("taken")


def test_a_pod_that_the_api_server_rejects_is_reported_with_its_error(kube: Kube) -> None:
    huge = {"requests": {"memory": "3Gi"}, "limits": {"memory": "1Gi"}}
    with kube.applied(sample("huge", drafts=0, resources=huge)):
        kube.wait_for("huge", "SpecValid", "False", words="memory", timeout=30)


def test_a_missing_model_is_reported_in_the_condition(kube: Kube) -> None:
    document = sample("lost", drafts=0)
    for component in ("target", "draft"):
        document["spec"][component]["source"] = {"uri": "pvc://weights/nowhere"}
    with kube.applied(document):
        kube.wait_for("lost", "TargetReady", "False", words="weights")


def test_a_deleted_resource_leaves_nothing(kube: Kube) -> None:
    kube.apply(sample("brief", drafts=1))
    eventually(lambda: bool(kube.pods("brief", "target")), "it has a pod", 60)
    kube("delete", "ssd", "brief", "--wait=true", "--timeout=60s")
    kinds = "deployments,services,serviceaccounts,networkpolicies,poddisruptionbudgets,pods"
    eventually(lambda: kube.items(kinds, "-l", "ssd.dev/name=brief") == [], "nothing is left", 90)
