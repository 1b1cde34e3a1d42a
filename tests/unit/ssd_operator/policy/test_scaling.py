import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd_operator.scenes import Scene, answer, draft, link, marked, target, unscheduled

from ssd.rpc.pool_codec import LinkStatus
from ssd_operator.api.spec import Autoscaling, DraftSpec, ScalingMode, Sharing, Source
from ssd_operator.observe.snapshot import TargetReport
from ssd_operator.policy.scaling import (
    Decision,
    Demand,
    History,
    Reason,
    internal_scaling,
    measure,
    next_replicas,
)

BOUNDS = Autoscaling(min_replicas=1, max_replicas=4)
TICK = 10.0


def load(
    replicas: int, eligible: float | None = None, *, unschedulable: int = 0, draining: int = 0
) -> Demand:
    """Demand at 32 sessions a draft; without ``eligible`` a sample is missing."""
    return Demand(
        replicas=replicas,
        eligible=eligible,
        sustainable_sessions=32.0,
        num_unschedulable=unschedulable,
        num_draining=draining,
    )


def steady(replicas: int, now: float = 0.0) -> History:
    """A full window of demand for the present number, the last one just before ``now``."""
    times = [now - 300.0 + TICK * step for step in range(30)]
    return History(first_seen=times[0], wanted=tuple((time, replicas) for time in times))


def decide(
    demand: Demand, history: History, now: float, bounds: Autoscaling = BOUNDS
) -> tuple[Decision, History]:
    history = next_replicas(bounds, demand, history, now)
    assert history.decision is not None
    return history.decision, history


def run(
    demand: Demand, history: History, num_ticks: int, bounds: Autoscaling = BOUNDS
) -> list[tuple[float, int]]:
    """Times and numbers of all changes under constant demand."""
    changes = []
    for tick in range(num_ticks):
        decision, history = decide(demand, history, tick * TICK, bounds)
        if decision.replicas != demand.replicas:
            changes.append((tick * TICK, decision.replicas))
        demand = replace(demand, replicas=decision.replicas)
    return changes


@pytest.mark.parametrize(
    ("demand", "changes"),
    [
        (load(1, 0), []),
        (load(1, 20), []),
        (load(1, 27), []),
        (load(1, 60), [3]),
        (load(1, 130), [3, 4]),
        (load(1, 60, unschedulable=1), []),
        (load(1), []),
        (load(4, 0), [3, 2, 1]),
        (load(4, 20), [3, 2, 1]),
        (load(4, 27), [3, 2]),
        (load(4, 60), [3]),
        (load(4, 130), []),
        (load(4, 60, unschedulable=1), [3]),
        (load(4), []),
    ],
)
def test_constant_demand_leads_to_these_numbers(demand: Demand, changes: list[int]) -> None:
    assert [number for _, number in run(demand, steady(demand.replicas), 60)] == changes


def test_a_decrease_waits_for_the_window_and_then_for_a_cooldown_each_time() -> None:
    # The last demand for four is ten seconds old at the start and leaves the window after 300 s.
    assert run(load(4, 0), steady(4), 60) == [(300.0, 3), (330.0, 2), (360.0, 1)]


@pytest.mark.parametrize(
    ("demand", "history", "now", "replicas", "reason"),
    [
        (load(0, 0), History(), 0, 1, "Bounds"),
        (load(9), History(), 0, 4, "Bounds"),
        (load(2), History(), 0, 2, "NoSamples"),
        (load(2, 99, unschedulable=1), History(), 0, 2, "Unschedulable"),
        (load(1, 60), History(last_change=0), 9.9, 1, "CoolingDown"),
        (load(1, 60), History(last_change=0), 10, 3, "ScaleUp"),
        (load(1, 130), History(), 0, 3, "ScaleUp"),
        (load(3, 1000), History(), 0, 4, "ScaleUp"),
        (load(2, 50), History(), 0, 2, "Steady"),
        (load(2, 0), History(first_seen=0), 299, 2, "Stabilizing"),
        (load(2, 0), History(first_seen=0), 300, 1, "ScaleDown"),
        (load(2, 0), History(first_seen=0, wanted=((10, 2),)), 310, 2, "Stabilizing"),
        (load(2, 0, draining=1), History(first_seen=0), 300, 2, "CoolingDown"),
        (load(2, 0), History(first_seen=0, last_change=271), 300, 2, "CoolingDown"),
    ],
)
def test_each_decision_has_its_reason(
    demand: Demand, history: History, now: float, replicas: int, reason: Reason
) -> None:
    assert decide(demand, history, now)[0] == Decision(replicas, reason)


def test_drafts_that_sustain_fewer_sessions_are_more_drafts() -> None:
    assert decide(replace(load(1, 20), sustainable_sessions=8.0), History(), 0)[0].replicas == 3


def test_after_a_full_window_without_samples_one_sample_removes_no_draft() -> None:
    history = steady(4)
    for tick in range(40):
        _, history = decide(load(4), history, tick * TICK)
    assert decide(load(4, 0), history, 400.0)[0] == Decision(4, "Stabilizing")


@pytest.mark.parametrize(("gap", "wait"), [(30.0, 0.0), (31.0, 300.0), (3600.0, 300.0)])
def test_after_a_gap_without_decisions_a_decrease_waits_for_a_full_window(
    gap: float, wait: float
) -> None:
    history, waits = History(), []
    for tick in range(40):
        _, history = decide(load(4, 0), history, (tick - 39) * TICK)
    for tick in range(40):
        decision, history = decide(load(4, 0), history, gap + tick * TICK)
        if decision.reason == "ScaleDown":
            waits.append(tick * TICK)
    assert waits[0] == wait


def test_a_gap_without_decisions_does_not_delay_an_increase() -> None:
    _, history = decide(load(1, 0), History(), 0.0)
    assert decide(load(1, 60), history, 3600.0)[0] == Decision(3, "ScaleUp")


def test_the_history_is_bounded_by_the_window() -> None:
    history = History()
    for tick in range(1000):
        _, history = decide(load(2, 50), history, tick * TICK)
    assert len(history.wanted) == 31


bounds_of_users = st.builds(
    lambda low, extra, occupancy, window, cooldown: Autoscaling(
        min_replicas=low,
        max_replicas=max(1, low + extra),
        target_occupancy=f"{occupancy:.2f}",
        scale_down_stabilization_seconds=window,
        cooldown_seconds=cooldown,
    ),
    low=st.integers(0, 12),
    extra=st.integers(0, 52),
    occupancy=st.floats(0.01, 1),
    window=st.sampled_from([0, 30, 300]),
    cooldown=st.sampled_from([0, 30, 120]),
)
eligible_sequences = st.floats(0, 5000)
histories = st.builds(
    History,
    first_seen=st.none() | st.floats(-600, 0),
    wanted=st.lists(st.tuples(st.floats(-600, 0), st.integers(0, 64)), max_size=5).map(
        lambda entries: tuple(sorted(entries))
    ),
    last_change=st.floats(-600, 0),
)
demands = st.builds(
    Demand,
    replicas=st.integers(0, 80),
    eligible=st.none() | eligible_sequences,
    sustainable_sessions=st.floats(1, 128),
    num_unschedulable=st.integers(0, 2),
    num_draining=st.integers(0, 2),
)


@given(bounds_of_users, demands, histories)
def test_the_number_is_bounded_and_grows_only_with_samples_and_room(
    bounds: Autoscaling, demand: Demand, history: History
) -> None:
    decision, _ = decide(demand, history, 1.0, bounds)
    assert bounds.min_replicas <= decision.replicas <= bounds.max_replicas
    if demand.num_unschedulable or demand.eligible is None:
        assert decision.replicas <= demand.replicas or decision.reason == "Bounds"


@given(bounds_of_users, demands, histories, eligible_sequences, eligible_sequences)
def test_more_demand_never_means_fewer_drafts(
    bounds: Autoscaling, demand: Demand, history: History, one: float, other: float
) -> None:
    numbers = [
        decide(replace(demand, eligible=each), history, 1.0, bounds)[0].replicas
        for each in sorted([one, other])
    ]
    assert numbers == sorted(numbers)


@given(bounds_of_users, eligible_sequences, st.floats(1, 128), st.integers(0, 64))
def test_constant_demand_reaches_a_number_and_keeps_it(
    bounds: Autoscaling, eligible: float, sessions: float, replicas: int
) -> None:
    demand = replace(load(replicas, eligible), sustainable_sessions=sessions)
    pause_ticks = 1 + int(max(bounds.cooldown_seconds, TICK) / TICK)
    num_ticks = int(bounds.scale_down_stabilization_seconds / TICK) + pause_ticks * 80
    changes = [number for _, number in run(demand, History(), num_ticks, bounds)]
    assert changes in (sorted(changes), sorted(changes, reverse=True))
    at_rest = replace(demand, replicas=changes[-1] if changes else replicas)
    assert run(at_rest, steady(at_rest.replicas), num_ticks, bounds) == []


@given(bounds_of_users, st.lists(st.none() | eligible_sequences, min_size=1, max_size=60))
def test_a_decrease_needs_a_full_window_of_smaller_demand(
    bounds: Autoscaling, samples: list[float | None]
) -> None:
    replicas, history = bounds.max_replicas, History()
    needed: list[tuple[float, float]] = []
    for tick, sample in enumerate(samples):
        now = tick * TICK
        decision, history = decide(load(replicas, sample), history, now, bounds)
        drafts = math.inf if sample is None else sample / (32 * float(bounds.target_occupancy))
        needed.append((now, drafts))
        if decision.replicas < replicas:
            window = bounds.scale_down_stabilization_seconds
            assert now >= window
            assert all(each < replicas for time, each in needed if time >= now - window)
        replicas = decision.replicas


def test_demand_is_that_of_ready_targets_and_drafts_with_active_links() -> None:
    pods = (
        *(target(), target("t1", cell=1), target("t2", cell=2, ready=False)),
        *(draft("d0"), marked(draft("d1")), unscheduled(draft("d2"))),
    )
    first = answer(
        "t0",
        link("d0", sustainable_sessions=8),
        link("d1", "Draining", sustainable_sessions=4),
        eligible_sequences=20,
    )
    second = answer("t1", link("d0", sustainable_sessions=6), eligible_sequences=10)
    stranger = answer("t2", eligible_sequences=99)
    scene = Scene(cells=3, drafts=2, pods=pods, pools=(first, second, stranger))
    assert measure(scene.snapshot) == Demand(
        replicas=2, eligible=30, sustainable_sessions=6, num_unschedulable=1, num_draining=1
    )
    without_links = replace(scene, pools=(answer("t0"), answer("t1")))
    assert measure(without_links.snapshot).sustainable_sessions == 32


COUNTS = [answer(name, eligible_sequences=9) for name in ("t0", "t1")]
OLD, OF_THE_FUTURE = (answer("t1", eligible_sequences=9, age=age) for age in (31, -3600))


@pytest.mark.parametrize("pools", [(), COUNTS[1:], (COUNTS[0], OLD), (COUNTS[0], OF_THE_FUTURE)])
def test_demand_is_unknown_while_a_ready_target_has_not_reported_its_eligible_sequences(
    pools: Sequence[tuple[str, TargetReport]],
) -> None:
    scene = Scene(cells=2, pods=(target(), target("t1", cell=1)), pools=tuple(pools))
    assert measure(scene.snapshot).eligible is None
    assert measure(replace(scene, pools=tuple(COUNTS)).snapshot).eligible == 18
    assert measure(Scene(pods=(target(ready=False),)).snapshot).eligible is None


REFUSED = link("d0", "Refused", reason="tokenizer_fingerprint: the draft has another tokenizer")


@pytest.mark.parametrize(
    ("links", "running", "need"),
    [
        ((REFUSED, link("d1", "Refused")), 99, (6, 1)),
        ((REFUSED, link("d1", "Connecting")), 99, (6, 1)),
        ((REFUSED,), 0, (6, 0)),
        ((REFUSED, link("d1")), 99, (105, 0)),
        ((REFUSED, link("d1", "Quarantined")), 99, (105, 0)),
        ((link("d0", "Lost"),), 99, (105, 0)),
        ((), 99, (105, 0)),
    ],
)
def test_a_target_that_every_draft_refuses_needs_one_draft(
    links: Sequence[LinkStatus], running: int, need: tuple[float, int]
) -> None:
    pods = (target(), target("t1", cell=1), draft("d0"), draft("d1"))
    served = answer("t0", link("d0"), eligible_sequences=6)
    other = answer("t1", *links, eligible_sequences=running)
    demand = measure(Scene(cells=2, pods=pods, pools=(served, other)).snapshot)
    assert (demand.eligible, demand.num_refused) == need


def test_each_refused_target_adds_one_draft_to_the_need_of_the_others() -> None:
    # 60 sequences, 32 a draft, 80 % of them used: 2.3 drafts.
    demands = [replace(load(1, 60), num_refused=number) for number in (0, 1)]
    assert [changes[-1][1] for changes in (run(each, History(), 9) for each in demands)] == [3, 4]


def test_sequences_that_speculate_in_spite_of_the_controller_need_drafts() -> None:
    forced = answer("t0", eligible_sequences=6, speculating=False)
    assert measure(Scene(pools=(forced,)).snapshot).eligible == 6
    idle = answer("t0", running_sequences=6)
    assert measure(Scene(pools=(idle,)).snapshot).eligible == 0


def test_a_decision_keeps_the_demand_that_it_follows_from() -> None:
    _, history = decide(load(1, 60), History(), 0)
    assert history.demand == load(1, 60)


@pytest.mark.parametrize("mode", [None, *get_args(ScalingMode)])
def test_only_mode_internal_is_scaled_by_the_operator(mode: ScalingMode | None) -> None:
    found = internal_scaling(Scene(mode=mode).resource)
    assert (found is not None) is (mode == "Internal")


@pytest.mark.parametrize(
    ("bounds", "sharing", "least"),
    [
        ((1, 9), "Cell", 3),
        ((5, 9), "Cell", 5),
        ((1, 2), "Cell", 2),
        ((0, 9), "Cell", 0),
        ((1, 9), "Pool", 1),
    ],
)
def test_each_cell_keeps_a_draft_unless_the_bounds_forbid_it(
    bounds: tuple[int, int], sharing: Sharing, least: int
) -> None:
    low, high = bounds
    scaling = Autoscaling(min_replicas=low, max_replicas=high)
    drafts = DraftSpec(source=Source(uri="demo://draft"), sharing=sharing, autoscaling=scaling)
    found = internal_scaling(Scene(cells=3, spec={"draft": drafts}).resource)
    assert found is not None
    numbers = [high, *(number for _, number in run(load(high, 0), steady(high), 100, found))]
    assert numbers[-1] == least
