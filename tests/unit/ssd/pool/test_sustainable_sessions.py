"""How many sessions a draft can serve in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.pool.sustainable_sessions import BatchTimes, sustainable_sessions


@pytest.mark.parametrize(
    ("batches", "sessions"),
    [
        ({}, 32),
        ({1: 0.002}, 5),
        ({1: 0.008, 8: 0.010}, 8),
        ({4: 0.010}, 4),
        ({4: 0.008, 8: 0.016}, 5),
        ({1: 0.030}, 1),
        ({2: 0.015, 8: 0.020}, 1),
        ({1: 0.0}, 32),
        ({1: 0.001, 8: 0.012}, 7),
        ({1: 0.011, 8: 0.008}, 10),
    ],
    ids=[
        "no times",
        "in proportion to one",
        "the larger batch has less time per session",
        "just in time",
        "late batches do not count",
        "one session is late",
        "none in time: the smallest counts",
        "faster than the clock",
        "fewer than in a larger batch that was late",
        "a smaller batch was late by accident",
    ],
)
def test_the_tables_of_all_sessions_fit_into_the_time(
    batches: dict[int, float], sessions: int
) -> None:
    assert sustainable_sessions(batches, 0.0100001, 32) == sessions


def test_before_the_first_measurement_all_sessions_are_sustainable() -> None:
    assert sustainable_sessions({1: 0.5}, 0.0, 7) == 7


SECONDS = st.floats(0.0, 10.0)


@given(st.dictionaries(st.integers(1, 64), SECONDS), SECONDS, st.integers(1, 64))
def test_the_result_is_between_one_and_the_maximum(
    batches: dict[int, float], available_seconds: float, max_sessions: int
) -> None:
    assert 1 <= sustainable_sessions(batches, available_seconds, max_sessions) <= max_sessions


@given(st.integers(1, 16), st.floats(1e-4, 0.01), st.floats(1e-5, 0.01))
def test_a_batch_just_in_time_is_the_maximum(sessions: int, fixed: float, each: float) -> None:
    seconds = fixed + sessions * each
    assert sustainable_sessions({sessions: seconds}, seconds * 1.0001, 64) == sessions


def test_the_time_of_a_batch_is_a_mean_of_its_slowest_tables() -> None:
    times = BatchTimes()
    times.add_batch([0.001, 0.004, 0.002])
    assert times.seconds_by_sessions == {3: 0.004}
    times.add_batch([0.012, 0.001, 0.001])
    assert times.seconds_by_sessions[3] == pytest.approx(0.005)
    times.add_batch([0.001])
    assert set(times.seconds_by_sessions) == {1, 3}


def test_smaller_batches_that_no_longer_occur_are_forgotten() -> None:
    """A larger one is kept: it was late, so a draft was added, which made batches smaller."""
    times = BatchTimes()
    for count in (1, 9) * 8:
        times.add_batch([0.3] * count)
    for _ in range(1000):
        times.add_batch([0.12] * 8)
    assert set(times.seconds_by_sessions) == {8, 9}
    for _ in range(8):
        times.add_batch([0.01])
    assert times.seconds_by_sessions[1] == 0.01


def test_a_size_that_has_occurred_few_times_does_not_count_beside_others() -> None:
    """The machine may have paused in it."""
    times = BatchTimes()
    times.add_batch([3.0] * 3)
    assert times.seconds_by_sessions == {3: 3.0}
    for _ in range(8):
        times.add_batch([0.012] * 2)
    assert set(times.seconds_by_sessions) == {2}
