import math
from typing import Any

import pytest
from tests.unit.ssd_operator.scenes import Scene, answer, draft, homeless, link, marked, target

from ssd_operator.api.spec import Autoscaling, Object, Placement, ScalingMode
from ssd_operator.observe.facts import DrainFact
from ssd_operator.policy.demand import drains_of, policy_of, pool_load
from ssd_operator.policy.drain import Drains
from ssd_operator.policy.scaling import History, Policy, PoolLoad, TargetLoad, next_replicas


def test_the_load_is_that_of_ready_targets_and_of_active_links() -> None:
    pods = (
        target(),
        target("t1", cell=1),
        target("t2", cell=2, ready=False),
        draft("d0"),
        marked(draft("d1")),
        homeless(draft("d2")),
    )
    pools = (
        answer(
            "t0",
            link("d0", sustainable_sessions=8),
            link("d1", "Draining", sustainable_sessions=4),
            eligible_sequences=20,
        ),
        answer("t2", eligible_sequences=99),
    )
    assert pool_load(Scene(cells=3, drafts=2, pods=pods, pools=pools).snapshot) == PoolLoad(
        replicas=2,
        unschedulable=1,
        draining=1,
        targets=(
            TargetLoad(age_seconds=1, eligible=20),
            TargetLoad(age_seconds=math.inf, eligible=0),
        ),
        capacities={"d0": 8},
    )


def test_a_target_that_finds_speculation_not_worthwhile_asks_for_no_draft() -> None:
    busy = answer("t0", link("d0", sustainable_sessions=8), eligible_sequences=16)
    idle = answer(
        "t1", link("d0", sustainable_sessions=8), eligible_sequences=99, speculating=False
    )
    scene = Scene(
        cells=2, drafts=1, pods=(target(), target("t1", cell=1), draft("d0")), pools=(busy, idle)
    )
    policy = Policy(minimum=1, maximum=64, occupancy=1.0)
    decision, _ = next_replicas(policy, pool_load(scene.snapshot), History(), now=0.0)
    assert decision.replicas == 2


def test_a_draft_that_two_targets_measured_counts_once() -> None:
    pools = (
        answer("t0", link("d0", sustainable_sessions=8)),
        answer("t1", link("d0", sustainable_sessions=6)),
    )
    pods = (target(), target("t1", cell=1), draft("d0"))
    assert pool_load(Scene(cells=2, pods=pods, pools=pools).snapshot).capacities == {"d0": 6}


def test_the_policy_is_the_users() -> None:
    fixed = Scene().resource.spec.draft
    autoscaling = Autoscaling(min_replicas=2, max_replicas=9, target_occupancy="0.5")
    asked = fixed.changed(autoscaling=autoscaling, sequences_per_replica=16)
    expected = Policy(minimum=2, maximum=9, occupancy=0.5, default_capacity=16)
    assert policy_of(asked) == expected


@pytest.mark.parametrize(
    "mode", [None, *(mode for mode in ScalingMode if mode is not ScalingMode.INTERNAL)]
)
def test_a_number_that_another_writes_has_no_policy(mode: ScalingMode | None) -> None:
    assert policy_of(Scene(mode=mode).resource.spec.draft) is None


def test_a_drain_knows_the_sessions_of_all_targets() -> None:
    pools = (answer("t0", link("d0", sessions=3)), answer("t1", link("d0", sessions=4)))
    pods = (target(), target("t1", cell=1), draft("d0"))
    facts = {"drains": {"d0": DrainFact(pod="d0")}}
    drains = drains_of(Scene(cells=2, pods=pods, pools=pools, facts=facts).snapshot)
    assert drains == Drains(facts=facts["drains"], sessions={"d0": 7}, drain_seconds=20)


def elsewhere(thing: Object) -> Object:
    return thing | {"spec": {"nodeName": "n2"}}


@pytest.mark.parametrize(
    ("policy", "topology", "pods", "misplaced"),
    [
        ("Required", "kubernetes.io/hostname", (target(), elsewhere(draft("d0"))), {"d0"}),
        ("Required", "kubernetes.io/hostname", (target(), draft("d0")), set()),
        ("Required", "kubernetes.io/hostname", (target(), homeless(draft("d0"))), set()),
        ("Required", "kubernetes.io/hostname", (homeless(target()), draft("d0")), set()),
        ("Required", "rack", (target(), elsewhere(draft("d0"))), set()),
        ("Preferred", "kubernetes.io/hostname", (target(), elsewhere(draft("d0"))), set()),
    ],
)
def test_drafts_follow_their_target_where_they_must_be_beside_it(
    policy: Any, topology: str, pods: tuple[Object, ...], misplaced: set[str]
) -> None:
    placement = Placement(policy=policy, topology_key=topology)
    assert (
        drains_of(Scene(pods=pods, spec={"placement": placement}).snapshot).misplaced == misplaced
    )
