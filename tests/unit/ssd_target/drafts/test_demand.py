"""Means over the last half minute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_target.drafts.demand import WINDOW_SECONDS, Demand, TimeMean


def test_before_anything_is_known_nobody_is_eligible() -> None:
    assert TimeMean().mean(5.0) == 0.0


def test_a_young_mean_is_over_the_time_that_is_known() -> None:
    mean = TimeMean()
    mean.note(4, 100.0)
    assert mean.mean(100.0) == 4
    assert mean.mean(102.0) == 4
    mean.note(0, 102.0)
    assert mean.mean(106.0) == pytest.approx(8 / 6)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    mean = TimeMean()
    mean.note(10, 0.0)
    mean.note(1, 20.0)
    assert mean.mean(35.0) == pytest.approx((15 * 10 + 15 * 1) / WINDOW_SECONDS)
    assert mean.mean(50.0) == pytest.approx(1)
    mean.note(2, 60.0)
    assert mean.mean(75.0) == pytest.approx(1.5)


STEPS = st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(0, 64)), min_size=1, max_size=60)


@given(STEPS)
def test_the_mean_is_that_of_the_steps_to_the_share_of_a_piece(
    steps: list[tuple[float, int]],
) -> None:
    mean, now, course = TimeMean(), 0.0, []
    for lasting, value in steps:
        mean.note(value, now)
        course.append((now, now + lasting, value))
        now += lasting
    oldest = max(0.0, now - WINDOW_SECONDS)
    area = sum(value * max(0.0, end - max(begin, oldest)) for begin, end, value in course)
    expected = area / (now - oldest)
    slack = 64 / WINDOW_SECONDS if now > WINDOW_SECONDS else 1e-6
    assert mean.mean(now) == pytest.approx(expected, abs=slack)


def test_many_changes_in_a_second_are_kept_as_one() -> None:
    mean = TimeMean()
    for number in range(10_000):
        mean.note(number % 2, number / 1000)
    assert len(mean._pieces) <= 12
    assert mean.mean(10.0) == pytest.approx(0.5, abs=0.01)


def test_tokens_a_round_are_those_of_one_sequence() -> None:
    demand = Demand()
    assert (demand.tokens_per_round, demand.verify_seconds, demand.efficiency) == (0.0, 0.0, 0.0)
    demand.note_round(1, 4, 0.002, 0.002)
    demand.note_round(3, 4, 0.008, 0.1)
    demand.note_round(1, 1, 0.003, 0.004)
    assert demand.tokens_per_round == pytest.approx(9 / 5)
    assert demand.verify_seconds == 0.003
    assert demand.efficiency == pytest.approx(0.003 / 0.004)


def test_rounds_of_long_ago_do_not_count() -> None:
    demand = Demand()
    demand.note_round(1, 100, 9.0, 90.0)
    for _ in range(256):
        demand.note_round(2, 6, 0.004, 0.005)
    assert (demand.tokens_per_round, demand.verify_seconds) == (3.0, 0.004)
    assert demand.efficiency == pytest.approx(0.8)
