import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.pool.time_mean import WINDOW_SECONDS, TimeMean


def test_the_mean_before_the_first_value_is_0() -> None:
    assert TimeMean().mean(5.0) == 0.0


def test_a_window_that_is_not_full_covers_the_known_time() -> None:
    mean = TimeMean()
    mean.set(4, 100.0)
    assert mean.mean(100.0) == 4
    assert mean.mean(102.0) == 4
    mean.set(0, 102.0)
    assert mean.mean(106.0) == pytest.approx(8 / 6)


def test_values_older_than_the_window_do_not_count() -> None:
    mean = TimeMean()
    mean.set(10, 0.0)
    mean.set(1, 20.0)
    assert mean.mean(35.0) == pytest.approx((15 * 10 + 15 * 1) / WINDOW_SECONDS)
    assert mean.mean(50.0) == pytest.approx(1)
    mean.set(2, 60.0)
    assert mean.mean(75.0) == pytest.approx(1.5)


STEPS = st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(0, 64)), min_size=1, max_size=60)


@given(STEPS)
def test_the_mean_is_that_of_the_steps_up_to_one_interval(steps: list[tuple[float, int]]) -> None:
    mean, now, course = TimeMean(), 0.0, []
    for lasting, value in steps:
        mean.set(value, now)
        course.append((now, now + lasting, value))
        now += lasting
    oldest = max(0.0, now - WINDOW_SECONDS)
    area = sum(value * max(0.0, end - max(begin, oldest)) for begin, end, value in course)
    expected = area / (now - oldest)
    slack = 64 / WINDOW_SECONDS if now > WINDOW_SECONDS else 1e-6
    assert mean.mean(now) == pytest.approx(expected, abs=slack)


def test_changes_within_a_second_share_an_interval() -> None:
    mean = TimeMean()
    for number in range(10_000):
        mean.set(number % 2, number / 1000)
    assert len(mean._points) <= 12
    assert mean.mean(10.0) == pytest.approx(0.5, abs=0.01)
