"""How long rounds wait, and when a link is left alone."""

import pytest

from ssd_target.drafts.link_health import (
    FIRST_QUARANTINE_SECONDS,
    FORGIVEN_AFTER_ROUNDS,
    LONGEST_QUARANTINE_SECONDS,
    CircuitBreaker,
    TableDeadline,
    opening_seconds,
)


def test_before_enough_tables_were_seen_only_the_cap_holds() -> None:
    table_deadline = TableDeadline(is_adaptive=True)
    for _ in range(15):
        table_deadline.observe(0.005)
    assert table_deadline.limit_seconds == float("inf")


def test_the_limit_follows_the_tables_and_leaves_room_for_slower_ones() -> None:
    table_deadline = TableDeadline(is_adaptive=True)
    for _ in range(64):
        table_deadline.observe(0.010)
    assert 0.012 < table_deadline.limit_seconds < 0.030


def test_a_round_without_tables_makes_the_latencies_worthless() -> None:
    table_deadline = TableDeadline(is_adaptive=True)
    for _ in range(64):
        table_deadline.observe(0.010)
    table_deadline.forget()
    assert table_deadline.limit_seconds == float("inf")


def test_a_fixed_deadline_never_moves() -> None:
    table_deadline = TableDeadline(is_adaptive=False)
    for _ in range(64):
        table_deadline.observe(0.010)
    assert table_deadline.limit_seconds == float("inf")
    assert table_deadline.median_seconds == pytest.approx(0.010)


def fall_late(circuit_breaker: CircuitBreaker, now: float) -> bool:
    return [circuit_breaker.note_round(now, any_in_time=False) for _ in range(3)][-1]


def test_the_third_late_round_in_a_row_begins_a_quarantine() -> None:
    circuit_breaker = CircuitBreaker(is_enabled=True)
    assert not circuit_breaker.note_round(1.0, any_in_time=False)
    assert not circuit_breaker.note_round(1.0, any_in_time=False)
    assert not circuit_breaker.note_round(1.0, any_in_time=True)
    assert fall_late(circuit_breaker, 1.0)
    assert circuit_breaker.is_active(1.0 + FIRST_QUARANTINE_SECONDS - 0.01)
    assert not circuit_breaker.is_active(1.0 + FIRST_QUARANTINE_SECONDS)


def test_quarantines_double_up_to_a_minute() -> None:
    circuit_breaker = CircuitBreaker(is_enabled=True)
    lengths = []
    for _ in range(6):
        assert fall_late(circuit_breaker, 0.0)
        lengths.append(circuit_breaker.until)
    assert lengths == [5.0, 10.0, 20.0, 40.0, 60.0, LONGEST_QUARANTINE_SECONDS]


def test_a_link_that_has_long_been_in_time_starts_with_a_clean_sheet() -> None:
    circuit_breaker = CircuitBreaker(is_enabled=True)
    fall_late(circuit_breaker, 0.0)
    for _ in range(FORGIVEN_AFTER_ROUNDS):
        circuit_breaker.note_round(100.0, any_in_time=True)
    fall_late(circuit_breaker, 200.0)
    assert circuit_breaker.until == 200.0 + FIRST_QUARANTINE_SECONDS


def test_a_link_can_be_left_alone_without_late_rounds() -> None:
    circuit_breaker = CircuitBreaker(is_enabled=True)
    assert circuit_breaker.begin(1.0)
    assert circuit_breaker.until == 1.0 + FIRST_QUARANTINE_SECONDS
    assert fall_late(circuit_breaker, 100.0)
    assert circuit_breaker.until == 100.0 + 2 * FIRST_QUARANTINE_SECONDS
    assert not CircuitBreaker(is_enabled=False).begin(1.0)


def test_an_opening_may_take_longer_the_more_there_is_to_prefill() -> None:
    assert opening_seconds(0) == 5.0
    assert opening_seconds(2000) == 15.0


def test_without_quarantine_a_late_link_stays_in_service() -> None:
    circuit_breaker = CircuitBreaker(is_enabled=False)
    assert not any(fall_late(circuit_breaker, 0.0) for _ in range(4))
    assert not circuit_breaker.is_active(0.0)
