import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_operator.policy.scaling import (
    Decision,
    History,
    Limit,
    Policy,
    PoolLoad,
    Reason,
    TargetLoad,
    next_replicas,
)

POLICY = Policy(minimum=1, maximum=4)
TICK = 10.0


def load(
    replicas: int, *eligible: float, age: float = 1.0, unschedulable: int = 0, draining: int = 0
) -> PoolLoad:
    targets = tuple(TargetLoad(age_seconds=age, eligible=number) for number in eligible)
    return PoolLoad(
        replicas=replicas, unschedulable=unschedulable, draining=draining, targets=targets
    )


def steady(replicas: int, now: float = 0.0) -> History:
    """A full window of wishes for the present number, its last one just before ``now``."""
    times = [now - 300.0 + TICK * step for step in range(30)]
    return History(first_seen=times[0], wanted=tuple((time, replicas) for time in times))


def run(pool: PoolLoad, history: History, num_ticks: int, policy: Policy = POLICY) -> list[int]:
    """The numbers that follow one another while everything else stays as it is."""
    numbers = []
    for tick in range(num_ticks):
        decision, history = next_replicas(policy, pool, history, tick * TICK)
        if decision.replicas != pool.replicas:
            numbers.append(decision.replicas)
        pool = replace(pool, replicas=decision.replicas)
    return numbers


@pytest.mark.parametrize(
    ("replicas", "pool", "changes"),
    [
        (1, load(1, 0), []),
        (1, load(1, 20), []),
        (1, load(1, 27), []),
        (1, load(1, 60), [3]),
        (1, load(1, 130), [3, 4]),
        (1, load(1, 60, unschedulable=1), []),
        (1, load(1, 20, age=31), []),
        (4, load(4, 0), [3, 2, 1]),
        (4, load(4, 20), [3, 2, 1]),
        (4, load(4, 27), [3, 2]),
        (4, load(4, 60), [3]),
        (4, load(4, 130), []),
        (4, load(4, 60, unschedulable=1), [3]),
        (4, load(4, 20, age=31), []),
    ],
)
def test_the_table_of_the_design(replicas: int, pool: PoolLoad, changes: list[int]) -> None:
    assert run(pool, steady(replicas), 60) == changes


def test_a_fall_waits_for_the_window_and_then_for_a_cooldown_each_time() -> None:
    pool, history, changed = load(4, 0), steady(4), []
    for tick in range(60):
        decision, history = next_replicas(POLICY, pool, history, tick * TICK)
        if decision.replicas != pool.replicas:
            changed.append(tick * TICK)
        pool = replace(pool, replicas=decision.replicas)
    # The last wish for four is ten seconds old at the start and leaves the window after 300.
    assert changed == [300.0, 330.0, 360.0]


@pytest.mark.parametrize(
    ("pool", "history", "now", "expected"),
    [
        (
            load(0, 0),
            History(),
            0,
            Decision(replicas=1, reason=Reason.BOUNDS, limited_by=Limit.MINIMUM),
        ),
        (
            load(9),
            History(),
            0,
            Decision(replicas=4, reason=Reason.BOUNDS, limited_by=Limit.MAXIMUM),
        ),
        (load(2), History(), 0, Decision(replicas=2, reason=Reason.NO_SAMPLES)),
        (load(2, 99, age=30.5), History(), 0, Decision(replicas=2, reason=Reason.NO_SAMPLES)),
        (
            load(2, 99, unschedulable=1),
            History(),
            0,
            Decision(replicas=2, reason=Reason.UNSCHEDULABLE),
        ),
        (
            load(1, 60),
            History(last_change=0),
            9.9,
            Decision(replicas=1, reason=Reason.COOLING_DOWN),
        ),
        (load(1, 60), History(last_change=0), 10, Decision(replicas=3, reason=Reason.SCALE_UP)),
        (
            load(1, 130),
            History(),
            0,
            Decision(replicas=3, reason=Reason.SCALE_UP, limited_by=Limit.STEP),
        ),
        (
            load(3, 1000),
            History(),
            0,
            Decision(replicas=4, reason=Reason.SCALE_UP, limited_by=Limit.MAXIMUM),
        ),
        (load(2, 50), History(), 0, Decision(replicas=2, reason=Reason.STEADY)),
        (load(2, 0), History(first_seen=0), 299, Decision(replicas=2, reason=Reason.STABILIZING)),
        (
            load(2, 0),
            History(first_seen=0),
            300,
            Decision(replicas=1, reason=Reason.SCALE_DOWN, limited_by=Limit.MINIMUM),
        ),
        (
            load(2, 0),
            History(first_seen=0, wanted=((10, 2),)),
            310,
            Decision(replicas=2, reason=Reason.STABILIZING),
        ),
        (
            load(2, 0, draining=1),
            History(first_seen=0),
            300,
            Decision(replicas=2, reason=Reason.COOLING_DOWN),
        ),
        (
            load(2, 0),
            History(first_seen=0, last_change=271),
            300,
            Decision(replicas=2, reason=Reason.COOLING_DOWN),
        ),
    ],
)
def test_each_answer_has_its_reason(
    pool: PoolLoad, history: History, now: float, expected: Decision
) -> None:
    decision, _ = next_replicas(POLICY, pool, history, now)
    assert decision == expected


def test_one_silent_target_among_several_stops_all_scaling() -> None:
    pool = load(1, 60)
    silent = TargetLoad(age_seconds=math.inf, eligible=0)
    pool = replace(pool, targets=(*pool.targets, silent))
    assert next_replicas(POLICY, pool, History(), 0)[0].reason is Reason.NO_SAMPLES


def test_a_target_for_which_speculation_does_not_pay_asks_for_no_drafts() -> None:
    pool = replace(
        load(1),
        targets=(TargetLoad(age_seconds=0, eligible=500, speculating=False),),
    )
    assert next_replicas(POLICY, pool, History(), 0)[0].reason is Reason.STEADY


def test_slow_drafts_ask_for_company_and_a_draft_without_capacity_is_not_counted() -> None:
    slow = replace(load(1, 20), capacities={"a": 8, "b": 0})
    assert next_replicas(POLICY, slow, History(), 0)[0].replicas == 3
    unmeasured = replace(slow, capacities={"b": 0})
    assert next_replicas(POLICY, unmeasured, History(), 0)[0].replicas == 1


def test_after_a_silence_as_long_as_the_window_one_sample_is_no_evidence() -> None:
    history = steady(4)
    for tick in range(40):
        _, history = next_replicas(POLICY, load(4), history, tick * TICK)
    decision, _ = next_replicas(POLICY, load(4, 0), history, 400.0)
    assert decision == Decision(replicas=4, reason=Reason.STABILIZING)


def test_what_left_the_window_is_forgotten() -> None:
    history = History()
    for tick in range(1000):
        _, history = next_replicas(POLICY, load(2, 50), history, tick * TICK)
    assert len(history.wanted) == 31


policies = st.builds(
    lambda low, extra, occupancy, window, cooldown: Policy(
        minimum=low,
        maximum=max(1, low + extra),
        occupancy=occupancy,
        window_seconds=window,
        cooldown_seconds=cooldown,
    ),
    low=st.integers(0, 12),
    extra=st.integers(0, 52),
    occupancy=st.floats(0.01, 1),
    window=st.sampled_from([0, 30, 300]),
    cooldown=st.sampled_from([0, 30, 120]),
)
demands = st.floats(0, 5000)
capacities = st.dictionaries(st.sampled_from("abc"), st.integers(0, 128))
histories = st.builds(
    History,
    first_seen=st.none() | st.floats(-600, 0),
    wanted=st.lists(st.tuples(st.floats(-600, 0), st.integers(0, 64)), max_size=5).map(
        lambda entries: tuple(sorted(entries))
    ),
    last_change=st.floats(-600, 0),
)
pools = st.builds(
    PoolLoad,
    replicas=st.integers(0, 80),
    unschedulable=st.integers(0, 2),
    draining=st.integers(0, 2),
    targets=st.lists(
        st.builds(
            TargetLoad, age_seconds=st.floats(0, 40), eligible=demands, speculating=st.booleans()
        ),
        max_size=3,
    ).map(tuple),
    capacities=capacities,
)


@given(policies, pools, histories)
def test_the_answer_is_within_the_bounds(policy: Policy, pool: PoolLoad, history: History) -> None:
    decision, _ = next_replicas(policy, pool, history, 1.0)
    assert policy.minimum <= decision.replicas <= policy.maximum


@given(policies, pools, histories, demands, demands)
def test_more_demand_never_means_fewer_drafts(
    policy: Policy, pool: PoolLoad, history: History, one: float, other: float
) -> None:
    numbers = [
        next_replicas(
            policy,
            replace(pool, targets=(TargetLoad(age_seconds=0, eligible=demand),)),
            history,
            1.0,
        )[0].replicas
        for demand in sorted([one, other])
    ]
    assert numbers == sorted(numbers)


@given(policies, pools, histories)
def test_pending_drafts_and_missing_samples_never_raise(
    policy: Policy, pool: PoolLoad, history: History
) -> None:
    decision, _ = next_replicas(policy, pool, history, 1.0)
    if pool.unschedulable or any(target.age_seconds > 30 for target in pool.targets):
        assert decision.replicas <= pool.replicas or decision.reason is Reason.BOUNDS


@given(policies, demands, capacities, st.integers(0, 64))
def test_constant_demand_comes_to_rest_and_stays(
    policy: Policy, demand: float, capacity: dict[str, int], replicas: int
) -> None:
    pool = replace(load(replicas, demand), capacities=capacity)
    pause_ticks = 1 + int(max(policy.cooldown_seconds, TICK) / TICK)
    num_ticks = int(policy.window_seconds / TICK) + pause_ticks * 80
    changes = run(pool, History(), num_ticks, policy)
    assert changes in (sorted(changes), sorted(changes, reverse=True))
    at_rest = replace(pool, replicas=changes[-1] if changes else replicas)
    assert run(at_rest, steady(at_rest.replicas), num_ticks, policy) == []


@given(policies, st.lists(st.one_of(st.none(), demands), min_size=1, max_size=60))
def test_a_number_falls_only_after_a_full_window_of_smaller_wishes(
    policy: Policy, samples: list[float | None]
) -> None:
    pool, history = load(policy.maximum), History()
    drafts_needed: list[tuple[float, float]] = []
    for tick, sample in enumerate(samples):
        now = tick * TICK
        pool = load(pool.replicas) if sample is None else load(pool.replicas, sample)
        decision, history = next_replicas(policy, pool, history, now)
        needed = math.inf if sample is None else sample / (32 * policy.occupancy)
        drafts_needed.append((now, needed))
        if decision.replicas < pool.replicas:
            assert now >= policy.window_seconds
            oldest = now - policy.window_seconds
            assert all(needed < pool.replicas for time, needed in drafts_needed if time >= oldest)
        pool = replace(pool, replicas=decision.replicas)
