"""What users are promised when something happens under load: no failed request, same text."""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from ssd.errors import NotReadyError, SSDError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
Sample = Callable[..., dict[str, Any]]


def assert_undisturbed(load: Any) -> None:
    assert load.tally.failures == []
    assert load.tally.num_different == 0
    assert load.tally.num_finished > 0


def test_a_pod_in_the_cluster_gets_the_text_that_the_target_writes_alone(
    kube: Any, demo: str, expected: Mapping[Any, Sequence[int]], in_cluster: Callable[..., str]
) -> None:
    for job, tokens in list(expected.items())[:3]:
        prompt, temperature, seed = job
        said = in_cluster(
            *("ssd", "generate", prompt, "--endpoint", f"{demo}.default.svc:50051", "--json"),
            *("--temperature", str(temperature), "--seed", str(seed)),
            *("--max-tokens", str(len(tokens))),
        )
        answer = json.loads(said)
        found = answer["token_ids"]
        assert found == list(tokens[: len(found)])
        assert answer["finish_reason"] == "stop" or len(found) == len(tokens)


def test_scaling_under_load_fails_nobody(
    kube: Any, demo: str, load: Any, wait: Any, figures: dict[str, object]
) -> None:
    kube("scale", f"ssd/{demo}", "--replicas=3")
    up = wait(lambda: active(kube, demo) == 3, "three drafts are linked", 90)
    load.go_on(16)
    kube("scale", f"ssd/{demo}", "--replicas=1")
    down = wait(lambda: len(kube.pods(demo, "draft")) == 1, "one draft is left", 90)
    load.go_on(16)
    figures["scale 1 to 3, linked, s"] = round(up, 1)
    figures["scale 3 to 1, pods gone, s"] = round(down, 1)
    assert_undisturbed(load)


def test_a_killed_draft_costs_no_request_and_comes_back(
    kube: Any,
    demo: str,
    load: Any,
    wait: Any,
    pids: Callable[[str], list[int]],
    figures: dict[str, object],
) -> None:
    wait(lambda: active(kube, demo) == 1, "a draft is linked", 60)
    (victim,) = pids("ssd_draft")
    os.kill(victim, signal.SIGKILL)
    load.go_on(8)
    back = wait(lambda: pids("ssd_draft") not in ([], [victim]), "the draft runs again", 60)
    linked = wait(lambda: active(kube, demo) == 1, "the draft is linked again", 60)
    load.go_on(8)
    figures["draft killed, linked again, s"] = round(back + linked, 1)
    assert_undisturbed(load)


def test_a_killed_target_loses_its_own_streams_only_and_repeats_give_the_same_text(
    kube: Any,
    demo: str,
    load: Any,
    wait: Any,
    pids: Callable[[str], list[int]],
    figures: dict[str, object],
) -> None:
    load.go_on(4)
    (victim,) = pids("ssd_target")
    os.kill(victim, signal.SIGKILL)
    wait(lambda: kube.condition(demo, "Ready").get("status") == "False", "it is said", 30)
    back = wait(lambda: kube.condition(demo, "Ready").get("status") == "True", "it is back", 90)
    load.go_on(16)
    failures: list[SSDError] = load.tally.failures
    assert failures, "its streams were open"
    assert all(isinstance(each, NotReadyError) for each in failures), failures
    assert load.tally.num_different == 0
    figures["target killed, Ready again, s"] = round(back, 1)


def test_the_operator_is_not_on_the_data_path(
    kube: Any, demo: str, load: Any, release: Any, wait: Any, figures: dict[str, object]
) -> None:
    kube("scale", f"ssd/{demo}", "--replicas=2")
    pod = release.operator()["metadata"]
    kube("delete", "pod", pod["name"], "-n", pod["namespace"], "--force", "--grace-period=0")
    load.go_on(8)
    converged = wait(lambda: active(kube, demo) == 2, "the new operator goes on", 90)
    figures["operator killed in mid-scale, converged, s"] = round(converged, 1)
    kube("scale", f"ssd/{demo}", "--replicas=1")
    wait(lambda: len(kube.pods(demo, "draft")) == 1, "one draft is left", 90)
    assert_undisturbed(load)


def active(kube: Any, name: str) -> int:
    return int(kube.get("ssd", name)["status"]["draft"].get("activeReplicas", 0))


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("service", ""),
        ("service", "-targets"),
        ("service", "-draft-0"),
        ("deployment", "-draft-0"),
        ("serviceaccount", "-draft"),
        ("networkpolicy", "-target"),
    ],
)
def test_a_child_that_is_deleted_is_made_again(
    kube: Any, demo: str, wait: Any, kind: str, suffix: str
) -> None:
    uid = kube.get(kind, f"{demo}{suffix}")["metadata"]["uid"]
    kube("delete", kind, f"{demo}{suffix}", "--wait=false")

    def is_new() -> bool:
        return bool(kube.get(kind, f"{demo}{suffix}")["metadata"]["uid"] != uid)

    wait(is_new, f"{kind} {demo}{suffix} is there again", 15)


def test_a_child_that_is_edited_by_hand_is_mended(kube: Any, demo: str, wait: Any) -> None:
    kube.wait_ready(demo, drafts=1)
    kube("scale", "deployment", f"{demo}-draft-0", "--replicas=5")
    kube(
        "patch",
        "service",
        demo,
        "--type=merge",
        "-p",
        '{"spec":{"ports":[{"name":"grpc","port":1234,"targetPort":50051}]}}',
    )
    wait(lambda: kube.get("deployment", f"{demo}-draft-0")["spec"]["replicas"] == 1, "one", 15)
    wait(lambda: kube.get("service", demo)["spec"]["ports"][0]["port"] == 50051, "the port", 15)


def test_a_foreign_object_is_left_alone_and_named(kube: Any, sample: Sample, wait: Any) -> None:
    kube("create", "service", "clusterip", "taken", "--tcp=1:1")
    try:
        kube.apply(sample("taken", drafts=1))
        wait(
            lambda: kube.condition("taken", "ResourcesOwned").get("reason") == "NameTaken",
            "it is said",
            45,
        )
        assert "taken" in kube.condition("taken", "ResourcesOwned")["message"]
        assert kube.condition("taken", "Ready")["status"] == "False"
        assert kube.get("service", "taken")["spec"]["ports"][0]["port"] == 1
        assert kube.pods("taken", "target") == []
    finally:
        kube("delete", "ssd", "taken", "--ignore-not-found")
        kube("delete", "service", "taken")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft": {"source": {"uri": "demo://target"}}}, "demo://"),
        ({"target": {"source": {"uri": "ftp://x"}}}, "uri"),
        ({"speculation": {"lookahead": 0}}, "lookahead"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_bad_resource_is_refused_with_the_field(
    kube: Any, sample: Sample, change: dict[str, Any], words: str
) -> None:
    document = sample("bad", drafts=1)
    document["spec"].update(change)
    assert words in kube.refuses(document)


def test_two_releases_in_two_namespaces_touch_only_their_own(
    kube: Any, second_release: Any, sample: Sample, wait: Any
) -> None:
    theirs = second_release.kube
    theirs.apply(sample("demo", drafts=0))
    theirs("wait", "ssd/demo", "--for=condition=Ready", "--timeout=120s")
    shown = theirs("get", "ssd", "demo", "--show-managed-fields", "-o", "json")
    fields = json.loads(shown)["metadata"]["managedFields"]
    assert "ssd-operator" in {each["manager"] for each in fields}
    theirs("delete", "ssd", "demo", "--wait=true")
    assert kube.get("ssd", "demo")["metadata"]["name"] == "demo"


def test_a_deleted_resource_leaves_nothing(kube: Any, sample: Sample, wait: Any) -> None:
    kube.apply(sample("brief", drafts=1))
    wait(lambda: bool(kube.pods("brief", "target")), "it has a pod", 60)
    kube("delete", "ssd", "brief", "--wait=true", "--timeout=60s")
    kinds = "deployments,services,serviceaccounts,networkpolicies,poddisruptionbudgets,pods"
    wait(lambda: kube.items(kinds, "-l", "ssd.dev/name=brief") == [], "all is gone", 90)
