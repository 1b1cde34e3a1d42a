"""Which drafts wait for their target, and until when."""

import pytest
from tests.unit.ssd_operator.resources import SAMPLES, children
from tests.unit.ssd_operator.scenes import target, terminating

from ssd_operator.api.spec import Object
from ssd_operator.children.names import COMPONENT_LABEL, REVISION_LABEL, revision_of
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.pod_state import name_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.rollout import Stage, held_drafts, with_template_of

TWO_CELLS, POOL = "llama-70b-two-cells", "pool"


def deployments(name: str, component: str) -> list[Object]:
    made = [each for each in children(SAMPLES[name]) if each["kind"] == "Deployment"]
    return [each for each in made if each["metadata"]["labels"][COMPONENT_LABEL] == component]


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
    *pods: Object, name: str = TWO_CELLS, cells: tuple[int, ...] = (), stage: Stage = Stage.NONE
) -> list[str]:
    """Names of the waiting draft Deployments; ``cells`` are those of waiting targets."""
    targets = deployments(name, "target")
    refs = frozenset(ref_of(targets[cell]) for cell in cells)
    snapshot = Snapshot(resource=SAMPLES[name], now=0.0, pods=pods)
    found = held_drafts(deployments(name, "draft"), targets, snapshot, refs, stage)
    return sorted(ref.name for ref in found)


ZERO, ONE = "llama-70b-draft-0", "llama-70b-draft-1"


@pytest.mark.parametrize("stage", [Stage.RUNNING, Stage.STUCK, Stage.FAILED])
def test_drafts_wait_for_the_preflight_of_their_target(stage: Stage) -> None:
    assert held(old(0), old(1), cells=(0, 1), stage=stage) == [ZERO, ONE]


def test_drafts_wait_until_the_old_target_is_gone() -> None:
    assert held(old(0), old(1), cells=(1,), stage=Stage.PASSED) == [ZERO, ONE]
    assert held(terminating(old(0)), old(1), cells=(1,), stage=Stage.PASSED) == [ZERO, ONE]
    assert held(old(1), cells=(1,), stage=Stage.PASSED) == [ONE]


def test_drafts_roll_while_the_new_target_loads() -> None:
    assert held(new(0, ready=False), old(1), cells=(1,), stage=Stage.PASSED) == [ONE]


def test_a_change_of_drafts_alone_rolls_at_once() -> None:
    assert held(new(0), new(1)) == []


def test_drafts_of_a_target_that_is_down_roll_at_once() -> None:
    assert held(target("t0", ready=False), new(1)) == []


def test_drafts_of_a_pool_wait_for_half_of_the_targets() -> None:
    assert held(old(0), old(1), name=POOL, cells=(1,), stage=Stage.PASSED) == ["pooled-draft"]
    assert held(old(1), name=POOL, cells=(1,), stage=Stage.PASSED) == []
    assert held(old(1), name=POOL, cells=(1,), stage=Stage.RUNNING) == ["pooled-draft"]


def test_a_waiting_deployment_keeps_its_template_and_follows_the_number() -> None:
    wanted = deployments("cpu-demo", "draft")[0]
    live = wanted | {
        "metadata": wanted["metadata"] | {"annotations": {"ssd.dev/hash": "old"}},
        "spec": wanted["spec"] | {"replicas": 7, "template": {"spec": {}}},
    }
    kept = with_template_of(live, wanted)
    assert kept["spec"] == wanted["spec"] | {"template": {"spec": {}}}
    assert kept["metadata"]["annotations"]["ssd.dev/hash"] == "old"
    assert name_of(kept) == name_of(wanted)
    assert Ref("Deployment", name_of(kept)) == ref_of(wanted)
