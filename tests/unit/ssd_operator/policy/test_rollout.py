"""Which drafts wait for their target, and until when."""

import pytest
from tests.unit.ssd_operator.resources import DEMO, POOL, TWO_CELLS, deployments, resource
from tests.unit.ssd_operator.scenes import target, terminating

from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.objects import REVISION_LABEL
from ssd_operator.observe.cluster import ref_of
from ssd_operator.observe.pod_state import revision_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.rollout import Stage, held_drafts, with_template_of

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
