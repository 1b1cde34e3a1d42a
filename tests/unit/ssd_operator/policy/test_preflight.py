"""The preflight pod, and the stage that is read from it."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from tests.unit.ssd_operator.resources import (
    PREFLIGHTS,
    SAMPLES,
    SETTINGS,
    SNAPSHOTS,
    children,
    preflight_of,
    resource,
    specs,
)
from tests.unit.ssd_operator.scenes import pod, terminating, unscheduled

from ssd_operator.api.spec import Object, Resource, Spec
from ssd_operator.children.names import CELL_LABEL, COMPONENT_LABEL, REVISION_LABEL
from ssd_operator.children.objects import ChildFactory
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import name_of, to_text
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.preflight import RETRY_SECONDS, Preflight, preflight_state
from ssd_operator.policy.rollout import Stage, outdated_targets

NOW = 1_000_000.0
DEMO = SAMPLES["cpu-demo"]
TWO_CELLS = SAMPLES["llama-70b-two-cells"]


def targets_of(demo: Resource) -> list[Object]:
    return [
        each
        for each in children(demo)
        if each["kind"] == "Deployment" and each["metadata"]["labels"][COMPONENT_LABEL] == "target"
    ]


def older(deployment: Object) -> Object:
    """The same Deployment with another revision."""
    live = copy.deepcopy(deployment)
    live["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] = "older"
    return live


def serving(deployment: Object, node: str) -> Object:
    """A ready pod of a Deployment."""
    cell = int(deployment["metadata"]["labels"][CELL_LABEL])
    made = pod("target", f"t{cell}", cell=cell)
    made["metadata"]["labels"][REVISION_LABEL] = "older"
    return made | {"spec": {"nodeName": node}}


def seen(
    demo: Resource = DEMO,
    pods: dict[int, str] | None = None,
    changed: tuple[int, ...] = (0, 1),
    live: Object | None = None,
) -> Snapshot:
    """Outdated targets of ``changed`` cells, and by cell the node of a ready pod."""
    wanted = targets_of(demo)
    found = [older(each) if cell in changed else each for cell, each in enumerate(wanted)]
    things = {Ref("Deployment", name_of(each)): each for each in found}
    if live is not None:
        things[Ref("Pod", name_of(live))] = live
    nodes = {0: "n1"} if pods is None else pods
    ready = tuple(serving(found[cell], node) for cell, node in nodes.items())
    return Snapshot(resource=demo, now=NOW, children=things, pods=ready)


def look(snapshot: Snapshot, demo: Resource = DEMO, now: float = NOW) -> Preflight:
    factory = ChildFactory(resource=demo, settings=SETTINGS)
    wanted, snapshot = targets_of(demo), replace(snapshot, now=now)
    return preflight_state(factory, wanted, outdated_targets(wanted, snapshot), snapshot)


def node_of(thing: Object) -> str:
    affinity = thing["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (field,) = term["matchFields"]
    assert field["key"] == "metadata.name"
    (node,) = field["values"]
    return str(node)


def running(age: float = 30.0, node: str = "n1", **status: Any) -> Object:
    """The live preflight pod of the demo."""
    made = copy.deepcopy(look(seen(pods={0: node})).pod)
    assert made is not None
    made["metadata"]["creationTimestamp"] = to_text(NOW - age)
    made["spec"]["nodeName"] = node
    return made | {"status": status}


def container(state: Object) -> Object:
    return {"containerStatuses": [{"name": "preflight", "image": "new:1", "state": state}]}


def ended(code: int, message: str = "") -> Object:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": message}}
    return {"phase": "Failed", **container(state)}


def waiting(reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", **container(state)}


@pytest.mark.parametrize("name", PREFLIGHTS)
def test_the_pod_equals_the_snapshot(name: str) -> None:
    reviewed = list(yaml.safe_load_all((SNAPSHOTS / f"preflight-{name}.yaml").read_text()))
    assert [preflight_of(SAMPLES[name])] == reviewed


@given(specs())
def test_the_pod_has_no_device_and_no_privilege_and_no_selector_matches_it(spec: Spec) -> None:
    demo = resource(spec)
    made = preflight_of(demo)
    (inside,) = made["spec"]["containers"]
    assert set(inside["resources"]["limits"]) == {"cpu", "memory"}
    assert inside["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not any("hostPath" in volume for volume in made["spec"]["volumes"])
    assert len(name_of(made)) <= 63
    labels = made["metadata"]["labels"]
    for each in children(demo):
        if each["kind"] == "PodMonitor":
            continue  # the pod has no port for it
        spec_of_child = each.get("spec", {})
        for kind in ("selector", "podSelector"):
            selector = spec_of_child.get(kind)
            wanted = (selector or {}).get("matchLabels", selector)
            assert wanted is None or not wanted.items() <= labels.items(), name_of(each)


def test_the_pod_runs_the_image_and_settings_of_the_target() -> None:
    demo = SAMPLES["everything"]
    (inside,) = preflight_of(demo)["spec"]["containers"]
    (engine,) = targets_of(demo)[0]["spec"]["template"]["spec"]["containers"]
    assert (inside["image"], inside["env"]) == (engine["image"], engine["env"])
    assert inside["args"] == ["--print-config"]
    assert inside["volumeMounts"] == engine["volumeMounts"]


def test_without_a_change_there_is_no_preflight() -> None:
    assert look(seen(changed=())) == Preflight()


def test_without_a_ready_target_there_is_no_preflight() -> None:
    assert look(seen(pods={})) == Preflight()


def test_a_preflight_runs_on_the_node_of_the_target() -> None:
    found = look(seen(pods={0: "n7"}))
    assert found.stage is Stage.RUNNING
    assert found.pod is not None
    assert node_of(found.pod) == "n7"
    assert found.pod["metadata"]["name"] == f"demo-preflight-{revision(DEMO)}"


def revision(demo: Resource) -> str:
    labels = targets_of(demo)[0]["spec"]["template"]["metadata"]["labels"]
    return str(labels[REVISION_LABEL])


@pytest.mark.parametrize(
    ("pods", "changed", "node"),
    [
        ({0: "n1", 1: "n2"}, (0, 1), "n1"),
        ({1: "n2"}, (0, 1), "n2"),
        ({0: "n1", 1: "n2"}, (1,), "n2"),
    ],
)
def test_cells_share_one_preflight_on_the_node_of_the_first_outdated_target(
    pods: dict[int, str], changed: tuple[int, ...], node: str
) -> None:
    found = look(seen(TWO_CELLS, pods, changed), TWO_CELLS)
    assert found.pod is not None
    assert node_of(found.pod) == node
    assert name_of(found.pod) == f"llama-70b-preflight-{revision(TWO_CELLS)}"


STAGES: list[tuple[Object, Stage, str]] = [
    ({}, Stage.RUNNING, "waits for a node|is being created"),
    ({"phase": "Running", **container({"running": {"startedAt": "x"}})}, Stage.RUNNING, "loads"),
    ({"phase": "Succeeded", **container({"terminated": {"exitCode": 0}})}, Stage.PASSED, ""),
    (ended(78, "SettingsError: max_num_seqs: 300"), Stage.FAILED, "max_num_seqs: 300"),
    (ended(1, "HubError: no answer"), Stage.FAILED, "code 1.*no answer"),
    (ended(128, "exec: python: not found"), Stage.FAILED, "python: not found"),
    (waiting("ErrImagePull", "manifest unknown"), Stage.FAILED, "new:1: manifest unknown"),
    (waiting("ImagePullBackOff"), Stage.FAILED, "cannot pull new:1"),
    (waiting("InvalidImageName", "bad"), Stage.FAILED, "bad"),
    (
        waiting("CreateContainerConfigError", 'secret "hf" not found'),
        Stage.FAILED,
        'secret "hf" not found',
    ),
    (
        {"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active for long"},
        Stage.STUCK,
        "DeadlineExceeded: Pod was active for long",
    ),
    ({"phase": "Failed", "reason": "Evicted"}, Stage.STUCK, "was ended: Evicted$"),
]


@pytest.mark.parametrize(("status", "stage", "message"), STAGES)
def test_the_status_of_the_pod_decides_on_stage_and_message(
    status: Object, stage: Stage, message: str
) -> None:
    live = running(**status)
    found = look(seen(live=live))
    assert found.stage is stage
    assert found.pod == live
    assert re.search(message, found.message)


def test_a_node_without_room_is_stuck_and_not_failed() -> None:
    live = unscheduled(running())
    live["spec"] = {"activeDeadlineSeconds": 2400}
    found = look(seen(live=live))
    assert (found.stage, found.pod) == (Stage.STUCK, live)
    assert "no room" in found.message


def test_a_preflight_that_the_cluster_ended_is_repeated_after_a_while() -> None:
    status = {"phase": "Failed", "reason": "Evicted"}
    young, old = (running(age=RETRY_SECONDS + more, **status) for more in (-1.0, 1.0))
    found = look(seen(live=young))
    assert (found.pod, found.again_after) == (young, 1.0)
    assert look(seen(live=old)).pod is None


def test_a_preflight_is_created_again_if_the_target_has_moved() -> None:
    found = look(seen(pods={0: "n2"}, live=running(node="n1")))
    assert (found.stage, found.pod) == (Stage.RUNNING, None)


def test_a_passed_preflight_counts_also_after_the_target_has_moved() -> None:
    live = running(node="n1", phase="Succeeded")
    assert look(seen(pods={0: "n2"}, live=live)).stage is Stage.PASSED


def test_a_preflight_that_is_being_deleted_is_awaited() -> None:
    live = terminating(running(**ended(78)))
    assert look(seen(live=live)).stage is Stage.RUNNING


def test_a_failed_preflight_counts_while_the_target_is_down() -> None:
    live = running(**ended(78, "SettingsError: no"))
    found = look(seen(pods={}, live=live))
    assert (found.stage, found.pod) == (Stage.FAILED, live)
