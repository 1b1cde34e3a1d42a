"""Single steps of a drain; ``test_convergence`` has sequences of steps."""

from collections.abc import Collection, Mapping

import pytest
from tests.unit.ssd_operator.scenes import Scene, draft, target, terminating, unscheduled

from ssd_operator.api.spec import Object, Placement
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import DRAIN_DEADLINE_ANNOTATION, Address, to_text
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.drain import (
    COST_ANNOTATION,
    Drain,
    DrainPlan,
    misplaced_drafts,
    plan_cell,
    victim_annotations,
)

NOW = 1_000_000.25
PAST, FUTURE = NOW - 5, NOW + 15


def pod(
    name: str, *, ready: bool = True, created: float = 0.0, deadline: float | str | None = None
) -> Object:
    made = draft(name, ready=ready, podIP="10.0.0.1")
    made["metadata"]["creationTimestamp"] = to_text(created)
    if deadline is not None:
        text = deadline if isinstance(deadline, str) else to_text(deadline)
        made["metadata"]["annotations"] = {DRAIN_DEADLINE_ANNOTATION: text, COST_ANNOTATION: "-1"}
    return made


PENDING = unscheduled(pod("pending"))


def plan(
    wanted: int,
    replicas: int,
    *pods: Object,
    now: float = NOW,
    results: Mapping[str, str] | None = None,
    sessions: Mapping[str, int] | None = None,
    misplaced: Collection[str] = (),
) -> DrainPlan:
    live = {Ref("Deployment", "demo-draft-0"): {"spec": {"replicas": replicas}}}
    snapshot = Snapshot(
        resource=Scene(drafts=wanted).resource,
        now=now,
        children=live,
        pods=pods,
        drains=results or {},
    )
    return plan_cell(snapshot, 0, misplaced, sessions or {})


def drained(*names: str, result: str = "Drained") -> dict[str, str]:
    return dict.fromkeys(names, result)


def marked(found: DrainPlan) -> list[str]:
    """New victims."""
    return [each.pod for each in found.drains if each.is_new]


@pytest.mark.parametrize("wanted", [2, 5])
def test_the_same_or_a_higher_number_is_set_at_once(wanted: int) -> None:
    assert plan(wanted, 2, pod("a"), pod("b")) == DrainPlan(replicas={0: wanted})


def test_a_victim_is_marked_and_called_before_the_deployment_shrinks() -> None:
    assert plan(1, 2, pod("a"), pod("b"), sessions={"a": 3}) == DrainPlan(
        drains=(Drain("b", 1_000_021, Address("10.0.0.1"), is_new=True),), replicas={0: 2}
    )


def test_a_draft_that_is_not_ready_and_has_sessions_is_drained() -> None:
    found = plan(1, 2, pod("a"), pod("b", ready=False), sessions={"a": 3, "b": 1})
    assert found == DrainPlan(
        drains=(Drain("b", 1_000_021, Address("10.0.0.1"), is_new=True),), replicas={0: 2}
    )


def test_a_mark_is_two_annotations() -> None:
    assert victim_annotations(1_000_021) == {
        "ssd.dev/drain-deadline": "1970-01-12T13:47:01Z",
        "controller.kubernetes.io/pod-deletion-cost": "-1000",
    }


def test_victims_are_in_the_order_of_a_replica_set_and_then_of_sessions() -> None:
    pods = [
        pod("busy", created=1),
        pod("young", created=9),
        pod("old", created=1),
        pod("starting", ready=False, created=5),
        PENDING,
    ]
    sessions = {"busy": 9, "young": 2, "old": 2}
    orders = [marked(plan(wanted, 5, *pods, sessions=sessions)) for wanted in (4, 0)]
    assert orders == [["pending"], ["pending", "starting", "young", "old", "busy"]]


@pytest.mark.parametrize("victim", [PENDING, pod("starting", ready=False)])
@pytest.mark.parametrize("now", [NOW, float(int(NOW))])
def test_a_pod_that_is_not_ready_and_serves_nothing_needs_no_drain(
    victim: Object, now: float
) -> None:
    (drain,) = plan(0, 1, victim, now=now).drains
    assert (drain.is_new, drain.address) == (True, None)
    assert drain.deadline <= now


def test_a_running_drain_is_called_again_and_awaited() -> None:
    found = plan(1, 2, pod("a"), pod("b", ready=False, deadline=FUTURE))
    assert found == DrainPlan(drains=(Drain("b", 1_000_015, Address("10.0.0.1")),), replicas={0: 2})


@pytest.mark.parametrize("result", ["Drained", "TimedOut"])
def test_the_deployment_shrinks_once_its_victim_has_drained(result: str) -> None:
    victim = pod("b", ready=False, deadline=FUTURE)
    assert plan(1, 2, pod("a"), victim, results=drained("b", result=result)) == DrainPlan(
        replicas={0: 1}
    )


def test_the_deployment_shrinks_after_the_deadline_in_any_case() -> None:
    assert plan(1, 2, pod("a"), pod("b", deadline=PAST)) == DrainPlan(replicas={0: 1})


def test_a_draft_that_was_not_reached_is_not_done() -> None:
    victim = pod("b", deadline=FUTURE)
    found = plan(1, 2, pod("a"), victim, results=drained("b", result="Unreachable"))
    assert found.replicas == {0: 2}
    assert [each.pod for each in found.drains] == ["b"]


def test_the_deployment_shrinks_once_all_victims_are_done_and_its_pods_are_gone() -> None:
    pods = [pod("a"), pod("b", deadline=FUTURE), pod("c", deadline=FUTURE)]
    assert plan(1, 3, *pods, results=drained("b")).replicas == {0: 3}
    assert plan(1, 3, *pods, results=drained("b", "c")).replicas == {0: 1}
    new_victim = plan(0, 2, pod("a"), pod("b", deadline=PAST))
    assert marked(new_victim) == ["a"]
    assert new_victim.replicas == {0: 2}
    assert plan(0, 1, pod("a"), pod("b", deadline=PAST)) == DrainPlan(replicas={0: 1})


def test_a_drained_pod_that_is_left_after_the_shrink_is_deleted() -> None:
    assert plan(1, 1, pod("b", deadline=PAST)) == DrainPlan(replicas={0: 1}, delete_pods=("b",))


def test_after_an_increase_a_drained_pod_is_replaced() -> None:
    pods = [pod("a"), pod("b", ready=False, deadline=FUTURE)]
    draining = plan(3, 2, *pods)
    assert (draining.replicas, draining.delete_pods) == ({0: 3}, ())
    assert [each.pod for each in draining.drains] == ["b"]
    done = plan(3, 3, *pods, results=drained("b"))
    assert (done.replicas, done.delete_pods) == ({0: 3}, ("b",))


def test_replicas_without_a_pod_need_no_victim() -> None:
    ended = pod("ended")
    ended["status"]["phase"] = "Failed"
    assert plan(1, 3, pod("a"), terminating(pod("gone")), ended) == DrainPlan(replicas={0: 1})


def test_a_mark_without_a_valid_time_is_no_mark() -> None:
    found = plan(0, 1, pod("a", deadline="soon"))
    assert found.drains == (Drain("a", 1_000_021, Address("10.0.0.1"), is_new=True),)


def test_a_misplaced_draft_is_replaced_one_at_a_time() -> None:
    misplaced = {"a", "b"}
    first = plan(2, 2, pod("a"), pod("b"), misplaced=misplaced)
    assert marked(first) == ["a"]
    assert first.replicas == {0: 2}
    waiting = plan(2, 2, pod("a", deadline=FUTURE), pod("b"), misplaced=misplaced)
    assert (marked(waiting), waiting.delete_pods) == ([], ())
    done = plan(2, 2, pod("a", deadline=PAST), pod("b"), misplaced=misplaced)
    assert (done.drains, done.delete_pods) == ((), ("a",))
    fresh = plan(2, 2, pod("c", ready=False), pod("b"), misplaced=misplaced)
    assert fresh.drains == ()


def test_misplaced_drafts_that_are_not_ready_are_replaced_first() -> None:
    misplaced = {"a", "b", "c"}
    pods = [pod("a"), pod("b", ready=False), pod("c", ready=False)]
    assert marked(plan(3, 3, *pods, misplaced=misplaced)) == ["b"]


def elsewhere(thing: Object) -> Object:
    return thing | {"spec": {"nodeName": "n2"}}


@pytest.mark.parametrize(
    ("policy", "topology", "pods", "misplaced"),
    [
        ("Required", "kubernetes.io/hostname", (target(), elsewhere(draft("d0"))), {"d0"}),
        ("Required", "kubernetes.io/hostname", (target(), draft("d0")), set()),
        ("Required", "kubernetes.io/hostname", (target(), unscheduled(draft("d0"))), set()),
        ("Required", "kubernetes.io/hostname", (unscheduled(target()), draft("d0")), set()),
        ("Required", "rack", (target(), elsewhere(draft("d0"))), set()),
        ("Preferred", "kubernetes.io/hostname", (target(), elsewhere(draft("d0"))), set()),
    ],
)
def test_drafts_on_another_node_than_their_target_are_misplaced_if_the_node_is_required(
    policy: str, topology: str, pods: tuple[Object, ...], misplaced: set[str]
) -> None:
    placement = Placement(policy=policy, topology_key=topology)  # type: ignore[arg-type]
    scene = Scene(pods=pods, spec={"placement": placement})
    assert misplaced_drafts(scene.snapshot) == misplaced
