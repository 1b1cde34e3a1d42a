"""The time after which a refused client tries again."""

from itertools import pairwise

import pytest

from ssd.testing.clock import FakeClock
from ssd_target.serving.retry_hint import MAX_SECONDS, MIN_SECONDS, RetryHint


def hint_after(ends: int, seconds_each: float) -> RetryHint:
    clock = FakeClock()
    hint = RetryHint(clock)
    for _ in range(ends):
        hint.add_end()
        clock.advance(seconds_each)
    return hint


def test_before_the_rate_is_known_a_hint_is_one_second() -> None:
    assert hint_after(1, 5.0).seconds(100) == 1.0


def test_hints_spread_evenly_over_the_time_in_which_the_queue_empties() -> None:
    hint = hint_after(20, 0.5)
    found = sorted(hint.seconds(40) for _ in range(100))
    assert 5.0 <= found[0] < 5.2
    assert 19.8 < found[-1] <= 20.0
    assert max(later - earlier for earlier, later in pairwise(found)) < 0.5


def test_a_queue_without_places_still_has_a_hint() -> None:
    assert 0.5 <= hint_after(20, 2.0).seconds(0) <= 2.0


@pytest.mark.parametrize(("seconds_each", "bound"), [(1e-4, MIN_SECONDS), (1e4, MAX_SECONDS)])
def test_a_hint_is_bounded(seconds_each: float, bound: float) -> None:
    assert hint_after(20, seconds_each).seconds(100) == bound


def test_time_without_requests_makes_no_hint_longer() -> None:
    clock = FakeClock()
    hint = RetryHint(clock)
    for pause in (0.0, 8 * 3600.0):
        clock.advance(pause)
        with hint.request(), hint.request():
            for _ in range(10):
                clock.advance(0.5)
                hint.add_end()
            assert max(hint.seconds(4) for _ in range(20)) <= 2.0


def test_a_target_on_which_nothing_ends_any_more_has_longer_hints() -> None:
    clock = FakeClock()
    hint = RetryHint(clock)
    for _ in range(10):
        clock.advance(0.1)
        hint.add_end()
    soon = max(hint.seconds(10) for _ in range(20))
    clock.advance(60.0)
    assert min(hint.seconds(10) for _ in range(20)) > 5 * soon
