"""How long rounds wait for columns, and openings for their first table."""

from dataclasses import replace

import pytest
from tests.unit.ssd.speculation.measured import measure

from ssd.pool.table_deadline import (
    ColumnTimes,
    FirstFrames,
    Prospect,
    RoundPace,
    opening_seconds,
    trial_until,
    wait_until,
)
from ssd.speculation.sources import TRIAL_ROUNDS

ROUND_SECONDS = 0.1
NOW = 5.0
LONG = 1.0
"""Time of the tables after a hit: only the next round gains."""
ONE_COLUMN = Prospect(0, 0, 1, NOW, branch_seconds=LONG)


def pace(
    acceptance: float = 0.8,
    plain_seconds: float = ROUND_SECONDS,
    *,
    of_backup: float = 0.5,
    hit_rate: float = 0.9,
) -> RoundPace:
    found = RoundPace()
    found.add_round(ROUND_SECONDS, is_plain=False)
    found.add_round(plain_seconds, is_plain=True)
    measure(found.sources, acceptance, of_backup, repeats=False)
    for _ in range(400):
        found.hits.add(100, round(100 * hit_rate))
    return found


def seconds(rows: list[Prospect], found: RoundPace | None = None) -> float:
    return wait_until(rows, found or pace(), NOW, NOW) - NOW


def test_without_a_round_so_far_only_the_deadline_ends_the_wait() -> None:
    assert wait_until([ONE_COLUMN], RoundPace(), NOW, NOW) == float("inf")
    assert wait_until([Prospect(3)], RoundPace(), NOW, NOW) == NOW


def test_a_sequence_without_a_column_waits_while_a_round_without_it_would_yield_less() -> None:
    found = seconds([ONE_COLUMN])
    assert found == pytest.approx(0.9 * 0.8 * ROUND_SECONDS, rel=1e-3)


def test_a_first_frame_with_more_columns_is_worth_a_longer_wait() -> None:
    three = 0.9 * (0.8 + 0.64 + 0.512) * ROUND_SECONDS
    assert seconds([Prospect(0, 0, 3, NOW, branch_seconds=LONG)]) == pytest.approx(three, rel=1e-3)


def test_complete_and_missed_tables_do_not_wait() -> None:
    assert seconds([Prospect(3), Prospect(0)]) == 0.0


def test_a_column_is_waited_for_if_it_comes_soon_enough() -> None:
    worth = 0.64 / 1.8 * ROUND_SECONDS
    assert seconds([Prospect(1, 0, 1, NOW + 0.9 * worth)]) == pytest.approx(worth, rel=1e-3)
    assert seconds([Prospect(1, 0, 1, NOW + 1.1 * worth)]) == 0.0


def test_a_round_does_not_begin_to_wait_again_when_something_else_arrives() -> None:
    until = wait_until([ONE_COLUMN], pace(), NOW, NOW)
    assert NOW < until < NOW + ROUND_SECONDS
    assert wait_until([ONE_COLUMN], pace(), NOW, until - 0.001) == until
    assert wait_until([ONE_COLUMN], pace(), NOW, until + 0.001) == until + 0.001


def test_the_time_that_pays_for_a_column_begins_with_the_one_before() -> None:
    worth = 0.64 / 1.8 * ROUND_SECONDS
    later = NOW + 0.05
    row = Prospect(1, 0, 1, later + 0.9 * worth, newest_at=later)
    assert wait_until([row], pace(), NOW, later) == pytest.approx(later + worth)


def test_a_first_frame_must_be_expected_in_half_of_the_time_that_pays() -> None:
    worth = 0.9 * 0.8 * ROUND_SECONDS
    assert seconds([Prospect(0, 0, 1, NOW + 0.4 * worth, branch_seconds=LONG)]) > 0.0
    assert seconds([Prospect(0, 0, 1, NOW + 0.6 * worth, branch_seconds=LONG)]) == 0.0


def test_a_first_frame_is_worth_more_if_the_tables_after_a_hit_take_less_time() -> None:
    def wait(branch_seconds: float, **of_pace: float) -> float:
        return seconds([Prospect(0, 0, 3, NOW, branch_seconds=branch_seconds)], pace(**of_pace))

    once = 0.9 * (0.8 + 0.64 + 0.512) * ROUND_SECONDS
    assert wait(ROUND_SECONDS) == pytest.approx(10 * once, rel=1e-3)
    assert wait(0.0) == wait(ROUND_SECONDS)
    assert once < wait(2 * ROUND_SECONDS) < 6 * once
    assert wait(9 * ROUND_SECONDS) == pytest.approx(once, rel=1e-3)
    assert wait(ROUND_SECONDS, hit_rate=0.5) < 2 * once
    # What loses in one round loses in all that follow.
    assert wait(0.0, plain_seconds=0.3 * ROUND_SECONDS) == 0.0


def test_a_round_waits_less_if_plain_rounds_are_shorter() -> None:
    found = pace(plain_seconds=0.6 * ROUND_SECONDS)
    assert seconds([ONE_COLUMN], found) == pytest.approx(0.072 * ROUND_SECONDS, rel=1e-2)
    assert seconds([ONE_COLUMN], pace(plain_seconds=0.5 * ROUND_SECONDS)) == 0.0
    # A round in which another sequence has a proposal is not plain.
    assert seconds([ONE_COLUMN, Prospect(3)], found) > 0.0


def test_the_deeper_a_proposal_the_less_another_column_is_worth() -> None:
    waits = [seconds([Prospect(depth, 0, 1, NOW)]) for depth in range(1, 6)]
    assert waits == sorted(waits, reverse=True)
    assert waits[1] < 0.25 * ROUND_SECONDS


def test_in_a_batch_one_sequence_delays_the_others_less() -> None:
    alone = seconds([ONE_COLUMN])
    assert seconds([ONE_COLUMN, *[Prospect(3)] * 7]) < alone / 7
    together = [Prospect(1, 0, 1, NOW)] * 8
    assert seconds(together) == pytest.approx(seconds(together[:1]))


def test_a_round_waits_less_for_columns_that_the_backup_replaces() -> None:
    alone, *continued = [
        seconds([Prospect(0, num, 1, NOW, branch_seconds=LONG)]) for num in (0, 1, 6)
    ]
    assert all(alone > 2 * each for each in continued)
    assert seconds([Prospect(0, 6, 1, NOW, branch_seconds=LONG)], pace(0.4, of_backup=0.8)) == 0.0


def test_no_round_waits_for_a_table_where_the_backup_is_accepted() -> None:
    waiting = Prospect(0, 6, 6, NOW, branch_seconds=LONG)
    found = pace(0.9)
    assert seconds([waiting], found) > 0.0
    repeating = replace(waiting, repeats=True)
    measure(found.sources, 0.9, 0.95, repeats=True)
    assert seconds([repeating], found) == 0.0
    found.sources.num_rounds = TRIAL_ROUNDS
    assert seconds([repeating], found) > 0.0, "else a late draft would never be measured again"
    found.sources.num_rounds += 1
    assert seconds([waiting], found) > 0.0
    # Nor do other sequences wait less because of it.
    both = wait_until([waiting, repeating], found, NOW, NOW)
    ready = wait_until([waiting, Prospect(0, 6, repeats=True)], found, NOW, NOW)
    assert both == pytest.approx(ready)


def test_no_round_waits_long_for_tokens_that_are_not_accepted() -> None:
    assert seconds([ONE_COLUMN], pace(0.05)) < 0.06 * ROUND_SECONDS


def test_one_long_round_does_not_change_the_pace() -> None:
    found = pace()
    for length in (ROUND_SECONDS, 60.0, ROUND_SECONDS):
        found.add_round(length, is_plain=False)
    assert found.proposed_seconds == ROUND_SECONDS


def test_the_time_between_columns_is_a_running_mean() -> None:
    times = ColumnTimes()
    times.add_column(0.010)
    assert times.seconds == 0.010
    times.add_column(0.030)
    assert 0.010 < times.seconds < 0.030


def test_the_time_between_columns_is_that_of_a_first_column_until_there_are_two() -> None:
    times = ColumnTimes()
    times.first[True].add_frame(1, 0.010)
    assert times.seconds == 0.010
    times.add_late_column(0.005)
    assert times.seconds == 0.010
    times.add_late_column(0.020)
    assert times.seconds == 0.020


def test_a_table_without_a_column_raises_the_expected_time_of_the_first_frame() -> None:
    times = FirstFrames()
    for _ in range(50):
        times.add_frame(6, 0.010)
    assert (times.depth, times.seconds) == pytest.approx((6.0, 0.010), rel=1e-3)
    times.add_late_frame(0.005)
    assert times.seconds < 0.011
    times.add_late_frame(0.100)
    assert times.seconds == 0.100
    for _ in range(20):
        times.add_frame(1, 0.010)
    assert times.seconds < 0.011


def test_first_frames_after_branches_and_other_tokens_have_their_own_times() -> None:
    times = ColumnTimes()
    times.first[False].add_frame(6, 0.010)
    assert times.expected_first(is_branch=True).seconds == 0.010, "nothing else is known"
    times.first[True].add_frame(6, 0.005)
    seconds_of = [times.expected_first(is_branch=each).seconds for each in (True, False)]
    assert seconds_of == [0.005, 0.010]


def test_an_opening_may_take_longer_if_more_tokens_are_prefilled() -> None:
    assert opening_seconds(0) == 5.0
    assert opening_seconds(2000) == 15.0


@pytest.mark.parametrize(("rounds", "period"), [(0.4, 1), (0.99, 1), (1.2, 2), (4.5, 5)])
def test_a_draft_that_is_late_and_was_bad_is_tried_again(rounds: float, period: int) -> None:
    """The longer the wait, the rarer: the trials cost about one of ``TRIAL_ROUNDS`` rounds."""
    found, late_by = pace(0.1, hit_rate=0.3), rounds * ROUND_SECONDS
    late = Prospect(0, 0, 3, NOW + late_by, branch_seconds=LONG)
    waits = []
    for found.sources.num_rounds in range(1, 10 * TRIAL_ROUNDS + 1):
        until = trial_until([Prospect(0), late], found, NOW)
        if until > NOW:
            assert until >= NOW + late_by
            waits.append(found.sources.num_rounds)
    assert waits == [TRIAL_ROUNDS * period * each for each in range(1, 10 // period + 1)]


def test_a_trial_needs_a_measured_round_and_waits_for_no_more_columns() -> None:
    found, unmeasured = pace(0.1, hit_rate=0.3), RoundPace()
    found.sources.num_rounds = unmeasured.sources.num_rounds = TRIAL_ROUNDS
    late = Prospect(0, 0, 3, NOW + ROUND_SECONDS)
    assert trial_until([late], unmeasured, NOW) == NOW
    assert trial_until([Prospect(1, 0, 1, NOW + ROUND_SECONDS)], found, NOW) == NOW
