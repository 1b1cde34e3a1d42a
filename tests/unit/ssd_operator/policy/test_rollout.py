"""The preflight pod and the stage that is read from it; which drafts wait for their target."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from tests.unit.ssd_operator.children.test_manifests import selectors
from tests.unit.ssd_operator.resources import (
    DEMO,
    POOL,
    SETTINGS,
    TWO_CELLS,
    children,
    deployments,
    not_restricted,
    resource,
    specs,
)
from tests.unit.ssd_operator.scenes import pod, target, terminating, unscheduled

from ssd_operator.api.spec import Object, Resource, Spec
from ssd_operator.children.objects import CELL_LABEL, REVISION_LABEL, Component, Workload
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.pod_state import UNREADY_SECONDS, name_of, revision_of, to_text
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.plan import PlanState, plan
from ssd_operator.policy.rollout import (
    RETRY_SECONDS,
    Preflight,
    Stage,
    held_drafts,
    held_targets,
    outdated_targets,
    preflight_state,
    with_template_of,
)

NOW = 1_000_000.0


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
    return made | {"spec": {"nodeName": node, "containers": []}}


def seen(
    demo: Resource = DEMO,
    pods: dict[int, str] | None = None,
    changed: tuple[int, ...] = (0, 1),
    live: Object | None = None,
) -> Snapshot:
    """Outdated targets of ``changed`` cells, and by cell the node of a ready pod."""
    wanted = deployments(demo, "target")
    found = [older(each) if cell in changed else each for cell, each in enumerate(wanted)]
    things = {Ref("Deployment", name_of(each)): each for each in found}
    if live is not None:
        things[Ref("Pod", name_of(live))] = live
    nodes = {0: "n1"} if pods is None else pods
    ready = tuple(serving(found[cell], node) for cell, node in nodes.items())
    return Snapshot(resource=demo, now=NOW, children=things, pods=ready)


def look(snapshot: Snapshot, demo: Resource = DEMO) -> Preflight:
    pods = Workload(resource=demo, settings=SETTINGS, component=Component.PREFLIGHT)
    wanted = deployments(demo, "target")
    return preflight_state(pods, wanted, outdated_targets(wanted, snapshot), snapshot, {})


def drawn(snapshot: Snapshot, demo: Resource = DEMO) -> Object:
    """The pod that is wanted."""
    made = look(snapshot, demo).pod
    assert made is not None
    return copy.deepcopy(made)


def node_of(thing: Object) -> str:
    affinity = thing["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (field,) = term["matchFields"]
    assert field["key"] == "metadata.name"
    (node,) = field["values"]
    return str(node)


def running(age: float = 30.0, node: str = "n1", **status: Any) -> Object:
    """The live preflight pod of the demo."""
    made = drawn(seen(pods={0: node}))
    made["metadata"]["creationTimestamp"] = to_text(NOW - age)
    made["spec"]["nodeName"] = node
    return made | {"status": status}


def unbound() -> Object:
    """The live preflight pod of the demo; its node has no room or is gone."""
    made = running()
    del made["spec"]["nodeName"]
    return unscheduled(made) | {"spec": made["spec"]}


def container(state: Object) -> Object:
    return {"containerStatuses": [{"name": "preflight", "image": "new:1", "state": state}]}


def ended(code: int, message: str = "", **more: Any) -> Object:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": message, **more}}
    return {"phase": "Failed", **container(state)}


def waiting(reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", **container(state)}


@given(specs())
def test_the_pod_has_no_device_and_no_privilege_and_no_selector_matches_it(spec: Spec) -> None:
    demo = resource(spec)
    made = drawn(seen(demo), demo)
    (inside,) = made["spec"]["containers"]
    assert set(inside["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
    assert not_restricted(made["spec"]) == []
    assert len(name_of(made)) <= 63
    labels = made["metadata"]["labels"]
    selecting = selectors(children(demo))
    assert not any(each.items() <= labels.items() for each in selecting)


def test_the_pod_runs_the_image_and_settings_of_the_target_once_and_requests_little() -> None:
    made = drawn(seen(TWO_CELLS), TWO_CELLS)
    assert (made["spec"]["restartPolicy"], made["spec"]["activeDeadlineSeconds"]) == ("Never", 2400)
    (inside,) = made["spec"]["containers"]
    (engine,) = deployments(TWO_CELLS, "target")[0]["spec"]["template"]["spec"]["containers"]
    for same in ("image", "env", "command", "volumeMounts"):
        assert inside[same] == engine[same]
    assert inside["args"] == ["--print-config"]
    assert inside["resources"]["requests"]["cpu"] == "100m", "with none it starves on a busy node"


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
    observed = seen(TWO_CELLS, pods, changed)
    assert look(observed, TWO_CELLS).stage == "Running"
    made = drawn(observed, TWO_CELLS)
    assert node_of(made) == node
    revision = revision_of(deployments(TWO_CELLS, "target")[0])
    assert name_of(made) == f"llama-70b-preflight-{revision}"


STAGES: list[tuple[Object, Stage, str]] = [
    ({}, "Running", "waits for a node|is being created"),
    ({"phase": "Running", **container({"running": {"startedAt": "x"}})}, "Running", "loads"),
    ({"phase": "Succeeded", **container({"terminated": {"exitCode": 0}})}, "Passed", ""),
    (ended(78, "SettingsError: max_num_seqs: 300"), "Failed", "max_num_seqs: 300"),
    (ended(128, "exec: python: not found"), "Failed", "python: not found"),
    (waiting("ErrImagePull", "manifest unknown"), "Failed", "new:1: manifest unknown"),
    (
        {"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active for long"},
        "Stuck",
        "DeadlineExceeded: Pod was active for long",
    ),
    ({"phase": "Failed", "reason": "Evicted"}, "Stuck", "was ended: Evicted$"),
    (ended(137, reason="ContainerStatusUnknown"), "Stuck", "exit code 137"),
    (ended(137, reason="OOMKilled"), "Failed", "was killed for memory"),
    (ended(143), "Stuck", "exit code 143"),
]


@pytest.mark.parametrize(("status", "stage", "message"), STAGES)
def test_the_status_of_the_pod_decides_on_stage_and_message(
    status: Object, stage: Stage, message: str
) -> None:
    live = running(**status)
    found = look(seen(live=live))
    assert found.stage == stage
    assert found.pod == live
    assert re.search(message, found.message)


def test_a_node_without_room_is_stuck_and_not_failed() -> None:
    live = unbound()
    found = look(seen(live=live))
    assert (found.stage, found.pod) == ("Stuck", live)
    assert "no room" in found.message


def test_a_preflight_that_the_cluster_ended_is_repeated_after_a_while() -> None:
    status = {"phase": "Failed", "reason": "Evicted"}
    young, old = (running(age=RETRY_SECONDS + more, **status) for more in (-1.0, 1.0))
    found = look(seen(live=young))
    assert (found.pod, found.again_after) == (young, 1.0)
    assert look(seen(live=old)).pod is None


def test_a_preflight_that_was_killed_is_repeated_a_while_after_its_end() -> None:
    young, old = (
        running(age=7200.0, **ended(137, finishedAt=to_text(NOW - RETRY_SECONDS + more)))
        for more in (1.0, 0.0)
    )
    found = look(seen(live=young))
    assert (found.pod, found.again_after) == (young, 1.0)
    assert look(seen(live=old)).pod is None


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_the_clock_of_a_node_does_not_repeat_a_preflight_at_once(seconds: float) -> None:
    live = running(age=2.0, **ended(137, finishedAt=to_text(NOW + seconds)))
    assert look(seen(live=live)).again_after >= RETRY_SECONDS - 2.0


@pytest.mark.parametrize("live", [running(), unbound()], ids=["bound", "its node is gone"])
def test_a_preflight_is_created_again_if_the_target_has_moved(live: Object) -> None:
    found = look(seen(pods={0: "n2"}, live=live))
    assert (found.stage, found.pod) == ("Running", None)


def test_a_preflight_stays_on_the_node_of_any_target_that_serves() -> None:
    live = drawn(seen(TWO_CELLS, {1: "n2"}), TWO_CELLS)
    assert look(seen(TWO_CELLS, {0: "n1", 1: "n2"}, live=live), TWO_CELLS).pod == live


@pytest.mark.parametrize(
    ("pods", "live", "stage"),
    [
        ({0: "n2"}, running(phase="Succeeded"), "Passed"),
        ({}, running(**ended(78, "SettingsError: no")), "Failed"),
        ({0: "n1"}, terminating(running(**ended(78))), "Running"),
    ],
    ids=["the target has moved", "the target is down", "it is being deleted"],
)
def test_a_result_counts_also_after_a_change_of_the_target(
    pods: dict[int, str], live: Object, stage: Stage
) -> None:
    found = look(seen(pods=pods, live=live))
    assert (found.stage, found.pod) == (stage, live)


def unready(seconds: float, *, has_crashed: bool = False) -> Object:
    """The status of a target that has been unready for this long."""
    since = to_text(NOW - seconds)
    return {
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": since}],
        "containerStatuses": [{"name": "target", "started": not has_crashed}],
    }


def with_status(snapshot: Snapshot, cell: int, status: Object) -> Snapshot:
    """The same, with this status of a cell's target."""
    pods = [
        each | {"status": status} if name_of(each) == f"t{cell}" else each for each in snapshot.pods
    ]
    return replace(snapshot, pods=tuple(pods))


BUSY, BROKEN = unready(UNREADY_SECONDS - 1.0), unready(UNREADY_SECONDS)
CRASHED = unready(1.0, has_crashed=True)


@pytest.mark.parametrize(("status", "waiting"), [(BUSY, {0, 1}), (BROKEN, {0}), (CRASHED, {0})])
def test_a_target_that_is_unready_for_a_moment_waits_while_another_cell_loads(
    status: Object, waiting: set[int]
) -> None:
    snapshot = with_status(seen(TWO_CELLS, {0: "n1", 1: "n2"}), 1, status)
    wanted = deployments(TWO_CELLS, "target")
    assert held_targets(wanted, wanted, snapshot, "Passed") == {
        ref_of(wanted[cell]) for cell in waiting
    }


@pytest.mark.parametrize("stage", ["Running", "Stuck"])
@pytest.mark.parametrize(("status", "is_held"), [(BUSY, True), (BROKEN, False), (CRASHED, False)])
def test_a_target_that_is_unready_for_a_moment_waits_for_its_preflight(
    stage: Stage, status: Object, *, is_held: bool
) -> None:
    snapshot, wanted = with_status(seen(), 0, status), deployments(DEMO, "target")
    assert bool(held_targets(wanted, wanted, snapshot, stage)) == is_held
    assert (look(snapshot).stage == "Running") == is_held


@pytest.mark.parametrize(
    ("stage", "waits"), [("Running", True), ("Failed", True), ("Passed", False), ("Stuck", False)]
)
@pytest.mark.parametrize("status", [BROKEN, CRASHED, {"phase": "Pending"}])
def test_a_target_that_loads_waits_for_the_preflight_while_another_cell_serves(
    status: Object, stage: Stage, *, waits: bool
) -> None:
    snapshot = with_status(seen(TWO_CELLS, {0: "n1", 1: "n2"}), 1, status)
    wanted = deployments(TWO_CELLS, "target")
    assert (ref_of(wanted[1]) in held_targets(wanted, wanted, snapshot, stage)) == waits


def test_a_pass_is_due_when_an_unready_target_becomes_broken() -> None:
    assert plan(with_status(seen(), 0, BUSY), SETTINGS, PlanState()).again_after == 1.0


POOLED = resource(POOL, "pooled")
ZERO, ONE = "llama-70b-draft-0", "llama-70b-draft-1"


def old(cell: int) -> Object:
    """A ready target of another revision."""
    return target(f"t{cell}", cell=cell)


def new(cell: int, *, ready: bool = True) -> Object:
    """A target of the revision wanted."""
    made = target(f"n{cell}", cell=cell, ready=ready)
    wanted = deployments(TWO_CELLS, "target")[cell]
    made["metadata"]["labels"][REVISION_LABEL] = revision_of(wanted)
    return made


def held(
    *pods: Object, of: Resource = TWO_CELLS, cells: tuple[int, ...] = (), stage: Stage = "Passed"
) -> list[str]:
    """Names of the waiting draft Deployments; ``cells`` are those of waiting targets."""
    targets = deployments(of, "target")
    refs = frozenset(ref_of(targets[cell]) for cell in cells)
    snapshot = Snapshot(resource=of, now=0.0, pods=pods)
    found = held_drafts(deployments(of, "draft"), targets, snapshot, refs, stage)
    return sorted(ref.name for ref in found)


@pytest.mark.parametrize("stage", ["Running", "Stuck", "Failed"])
def test_drafts_wait_for_the_preflight_of_their_target(stage: Stage) -> None:
    assert held(old(0), old(1), cells=(0, 1), stage=stage) == [ZERO, ONE]


@pytest.mark.parametrize(
    ("pods", "waiting"),
    [
        ((old(0), old(1)), [ZERO, ONE]),
        ((terminating(old(0)), old(1)), [ZERO, ONE]),
        ((old(1),), [ONE]),
        ((new(0, ready=False), old(1)), [ONE]),
    ],
)
def test_drafts_wait_until_the_old_target_is_gone(
    pods: tuple[Object, ...], waiting: list[str]
) -> None:
    assert held(*pods, cells=(1,)) == waiting


@pytest.mark.parametrize("first", [new(0), target("t0", ready=False)], ids=["new", "down"])
def test_a_change_of_drafts_alone_or_beside_a_target_that_is_down_rolls_at_once(
    first: Object,
) -> None:
    assert held(first, new(1), stage="None") == []


def test_drafts_of_a_pool_wait_for_half_of_the_targets() -> None:
    assert held(old(0), old(1), of=POOLED, cells=(1,)) == ["pooled-draft"]
    assert held(old(1), of=POOLED, cells=(1,)) == []
    assert held(old(1), of=POOLED, cells=(1,), stage="Running") == ["pooled-draft"]


def test_a_waiting_deployment_keeps_its_template_and_follows_the_number() -> None:
    (wanted,) = deployments(DEMO, "draft")
    live = wanted | {
        "metadata": wanted["metadata"] | {"annotations": {"ssd.dev/hash": "old"}},
        "spec": wanted["spec"] | {"replicas": 7, "template": {"spec": {}}},
    }
    kept = with_template_of(live, wanted)
    assert kept["spec"] == wanted["spec"] | {"template": {"spec": {}}}
    assert kept["metadata"]["annotations"]["ssd.dev/hash"] == "old"
    assert ref_of(kept) == ref_of(wanted)
