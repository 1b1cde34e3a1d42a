"""The operator restores its own objects and does not change those of others."""

import re
from typing import Any

import pytest
from tests.cluster.kube import Kube, eventually, sample

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
EXTRA_KEY = '[{"op": "add", "path": "/spec/selector/extra", "value": "x"}]'


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("service", ""),
        ("service", "-targets"),
        ("service", "-draft-0"),
        ("deployment", "-draft-0"),
        ("deployment", "-target-0"),
        ("serviceaccount", "-target"),
        ("serviceaccount", "-draft"),
        ("networkpolicy", "-target"),
        ("networkpolicy", "-draft"),
    ],
)
def test_a_deleted_child_is_created_again(kube: Kube, demo: str, kind: str, suffix: str) -> None:
    uid = kube.get(kind, f"{demo}{suffix}")["metadata"]["uid"]
    kube("delete", kind, f"{demo}{suffix}", "--wait=false")

    def is_new() -> bool:
        return bool(kube.get(kind, f"{demo}{suffix}")["metadata"]["uid"] != uid)

    eventually(is_new, f"{kind} {demo}{suffix} exists again", 15)


def test_a_manual_edit_of_a_child_is_reverted(kube: Kube, demo: str) -> None:
    kube.wait_ready(demo)
    kube.wait_linked(demo, 1)
    port = '{"spec":{"ports":[{"name":"grpc","port":1234,"targetPort":50051}]}}'
    kube("scale", "deployment", f"{demo}-draft-0", "--replicas=5")
    kube("patch", "service", demo, "--type=merge", "-p", port)
    kube("label", "networkpolicy", f"{demo}-draft", "ssd.dev/name-", "app.kubernetes.io/name-")

    def is_restored() -> bool:
        return bool(
            kube.get("deployment", f"{demo}-draft-0")["spec"]["replicas"] == 1
            and kube.get("service", demo)["spec"]["ports"][0]["port"] == 50051
            and kube.get("networkpolicy", f"{demo}-draft")["metadata"]["labels"].get("ssd.dev/name")
        )

    eventually(is_restored, "all three edits are reverted", 15)


def test_manual_additions_to_fields_of_the_operator_are_removed(
    kube: Kube, demo: str, figures: dict[str, object]
) -> None:
    kube.wait_ready(demo)
    kube.wait_linked(demo, 1)
    drafts = f"{demo}-draft-0"
    kube("rollout", "pause", f"deployment/{drafts}")
    kube("set", "env", f"deployment/{drafts}", "EXTRA=1")
    kube("patch", "service", demo, "--type=json", "-p", EXTRA_KEY)

    def is_restored() -> bool:
        spec = kube.get("deployment", drafts)["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        is_added = "EXTRA" in {each["name"] for each in container["env"]}
        selector = kube.get("service", demo)["spec"]["selector"]
        return not (spec.get("paused") or is_added or "extra" in selector)

    seconds = eventually(is_restored, "selector, variable and pause are reverted", 15)
    figures["added selector key, variable and pause reverted, s"] = round(seconds, 1)
    kube.wait_ready(demo)
    eventually(
        lambda: kube.condition(demo, "Progressing")["reason"] == "UpToDate",
        "everything is up to date",
        60,
    )


def test_ready_is_false_while_the_service_has_no_endpoint(kube: Kube, demo: str) -> None:
    kube.wait_ready(demo)
    # Paused, so that the operator does not restore the selector.
    kube("patch", "ssd", demo, "--type=merge", "-p", '{"spec":{"paused":true}}')
    kube("patch", "service", demo, "--type=json", "-p", EXTRA_KEY)

    def is_reported() -> bool:
        found = kube.condition(demo, "Ready")
        return (found["status"], found["reason"]) == ("False", "EndpointMissing")

    try:
        eventually(is_reported, "Ready is False", 15)
    finally:
        kube("patch", "ssd", demo, "--type=merge", "-p", '{"spec":{"paused":false}}')
    eventually(lambda: kube.condition(demo, "Ready")["status"] == "True", "Ready is True", 15)


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
    kube.apply(document)
    quoted = re.compile(r"RuntimeError: no bf16 here \(ssd/\S+\.py:\d+\)")
    try:

        def is_reported() -> bool:
            found = kube.condition("crash", "TargetReady")
            return found["reason"] == "CrashLoop" and bool(quoted.search(found["message"]))

        eventually(is_reported, "the condition quotes the error", 90)
        events = kube.items("events", "--field-selector", "involvedObject.name=crash")
        messages = [each["message"] for each in events if each["reason"] == "CrashLoop"]
        assert messages
        assert all(quoted.search(each) for each in messages), messages
    finally:
        kube("delete", "ssd", "crash", "--ignore-not-found")
        kube("delete", "configmap", "broken", "--ignore-not-found")


def test_a_deployment_that_is_deleted_without_its_pods_adopts_them_again(
    kube: Kube, demo: str
) -> None:
    kube.wait_ready(demo)
    (pod,) = kube.pods(demo, "target")
    uid = kube.get("deployment", f"{demo}-target-0")["metadata"]["uid"]
    kube("delete", "deployment", f"{demo}-target-0", "--cascade=orphan")

    def is_adopted() -> bool:
        found = kube.get("deployment", f"{demo}-target-0")
        is_new = found["metadata"]["uid"] != uid
        return is_new and bool(found.get("status", {}).get("readyReplicas"))

    eventually(is_adopted, "a new Deployment has the pod", 20)
    kube("annotate", "ssd", demo, "example.com/look=again", "--overwrite")
    eventually(lambda: kube.condition(demo, "Ready")["status"] == "True", "it is Ready", 20)
    (same,) = kube.pods(demo, "target")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]


def test_annotations_of_others_on_a_child_stay(kube: Kube, demo: str) -> None:
    kube("annotate", "service", demo, "example.com/note=mine", "--overwrite")
    kube("delete", "service", f"{demo}-targets", "--wait=false")
    eventually(lambda: bool(kube.get("service", f"{demo}-targets")), "a pass has run", 15)
    assert kube.get("service", demo)["metadata"]["annotations"]["example.com/note"] == "mine"


def test_a_foreign_object_is_reported_and_not_changed(kube: Kube) -> None:
    kube("create", "service", "clusterip", "taken", "--tcp=1:1")
    try:
        kube.apply(sample("taken", drafts=1))
        eventually(
            lambda: kube.condition("taken", "ResourcesOwned").get("reason") == "NameTaken",
            "the condition reports it",
            45,
        )
        assert "taken" in kube.condition("taken", "ResourcesOwned")["message"]
        assert kube.condition("taken", "Ready")["status"] == "False"
        assert kube.get("service", "taken")["spec"]["ports"][0]["port"] == 1
        assert kube.pods("taken", "target") == []
        kube("delete", "service", "taken")
        kube.wait_ready("taken")
    finally:
        kube("delete", "ssd", "taken", "--ignore-not-found")
        kube("delete", "service", "taken", "--ignore-not-found")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": {"source": {"uri": "demo://target"}}}, "demo://"),
        ({"target": {"source": {"uri": "ftp://x"}}}, "uri"),
        ({"speculation": {"lookahead": 0}}, "lookahead"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_an_invalid_resource_is_rejected_with_the_field(
    kube: Kube, change: dict[str, Any], message: str
) -> None:
    document = sample("bad", drafts=1)
    document["spec"].update(change)
    assert message in kube.error_for(document)


def test_a_pod_that_the_api_server_rejects_is_reported_with_its_error(kube: Kube) -> None:
    document = sample("huge", drafts=0)
    document["spec"]["target"]["resources"] = {
        "requests": {"memory": "3Gi"},
        "limits": {"memory": "1Gi"},
    }
    kube.apply(document)
    try:

        def is_reported() -> bool:
            found = kube.condition("huge", "SpecValid")
            return bool(found.get("status") == "False" and "memory" in found["message"])

        eventually(is_reported, "the condition quotes the API server", 30)
    finally:
        kube("delete", "ssd", "huge")


def test_a_missing_model_is_reported_in_the_condition(kube: Kube) -> None:
    document = sample("lost", drafts=0)
    document["spec"]["target"]["source"] = {"uri": "pvc://weights/nowhere"}
    document["spec"]["draft"]["source"] = {"uri": "pvc://weights/nowhere"}
    kube.apply(document)
    try:

        def is_reported() -> bool:
            found = kube.condition("lost", "TargetReady")
            return bool(found.get("status") == "False" and "weights" in found["message"])

        eventually(is_reported, "the condition names the claim", 60)
    finally:
        kube("delete", "ssd", "lost")


def test_a_deleted_resource_leaves_nothing(kube: Kube) -> None:
    kube.apply(sample("brief", drafts=1))
    eventually(lambda: bool(kube.pods("brief", "target")), "it has a pod", 60)
    kube("delete", "ssd", "brief", "--wait=true", "--timeout=60s")
    kinds = "deployments,services,serviceaccounts,networkpolicies,poddisruptionbudgets,pods"
    eventually(lambda: kube.items(kinds, "-l", "ssd.dev/name=brief") == [], "nothing is left", 90)
