"""How long rounds wait for columns, and openings for their first table."""

import pytest

from ssd_target.drafts.table_deadline import (
    ColumnTimes,
    RoundPace,
    Row,
    opening_seconds,
    wait_until,
)

ROUND_SECONDS = 0.1


def pace(acceptance: float = 0.8) -> RoundPace:
    found = RoundPace()
    found.note_round(ROUND_SECONDS)
    for _ in range(400):
        accepted = round(100 * acceptance)
        found.note_outcomes([(accepted, accepted), *[(0, 1)] * (100 - accepted)])
    assert found.acceptance == pytest.approx(acceptance, rel=1e-3)
    return found


def seconds(rows: list[Row], acceptance: float = 0.8, now: float = 5.0) -> float:
    return wait_until(rows, pace(acceptance), 5.0, now) - 5.0


def test_without_a_round_so_far_only_the_deadline_ends_the_wait() -> None:
    assert wait_until([Row(0, is_waiting=True)], RoundPace(), 5.0, 5.0) == float("inf")


def test_a_sequence_without_a_column_waits_while_a_round_without_it_would_yield_less() -> None:
    for now in (5.0, 5.07):
        waits = seconds([Row(0, is_waiting=True)], now=now)
        assert waits == pytest.approx(0.8 * ROUND_SECONDS, rel=1e-3)


def test_complete_and_missed_tables_do_not_wait() -> None:
    assert seconds([Row(3), Row(0)]) == 0.0


def test_a_column_is_waited_for_if_it_comes_soon_enough() -> None:
    worth = 0.64 / 1.8 * ROUND_SECONDS
    soon = Row(1, is_waiting=True, next_at=5.0 + 0.9 * worth)
    assert seconds([soon]) == pytest.approx(worth, rel=1e-3)
    assert seconds([Row(1, is_waiting=True, next_at=5.0 + 1.1 * worth)]) == 0.0


def test_the_deeper_a_proposal_the_less_another_column_is_worth() -> None:
    waits = [seconds([Row(depth, is_waiting=True, next_at=5.0)]) for depth in range(1, 6)]
    assert waits == sorted(waits, reverse=True)
    assert waits[1] < 0.25 * ROUND_SECONDS


def test_in_a_batch_one_sequence_delays_the_others_less() -> None:
    alone = seconds([Row(0, is_waiting=True)])
    others = [Row(3)] * 7
    assert seconds([Row(0, is_waiting=True), *others]) < alone / 7
    together = [Row(1, is_waiting=True, next_at=5.0)] * 8
    assert seconds(together) == pytest.approx(seconds(together[:1]))


def test_no_round_waits_long_for_tokens_that_are_not_accepted() -> None:
    assert seconds([Row(0, is_waiting=True)], acceptance=0.05) < 0.06 * ROUND_SECONDS


def test_rounds_without_proposals_do_not_change_the_acceptance() -> None:
    found = pace(0.6)
    for _ in range(1000):
        found.note_outcomes([(0, 0)])
    assert found.acceptance == pytest.approx(0.6, rel=1e-3)


def test_one_long_round_does_not_change_the_pace() -> None:
    found = pace()
    for length in (ROUND_SECONDS, 60.0, ROUND_SECONDS):
        found.note_round(length)
    assert found.seconds == ROUND_SECONDS


def test_the_time_between_columns_is_a_running_mean() -> None:
    times = ColumnTimes()
    times.note(0.010)
    assert times.seconds == 0.010
    times.note(0.030)
    assert 0.010 < times.seconds < 0.030


def test_an_opening_may_take_longer_if_more_tokens_are_prefilled() -> None:
    assert opening_seconds(0) == 5.0
    assert opening_seconds(2000) == 15.0
