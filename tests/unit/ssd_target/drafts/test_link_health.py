"""How long rounds wait, and when a link is left alone."""

import pytest

from ssd_target.drafts.link_health import (
    FIRST_QUARANTINE_SECONDS,
    FORGIVEN_AFTER_ROUNDS,
    LONGEST_QUARANTINE_SECONDS,
    Patience,
    Quarantine,
    opening_seconds,
)


def test_before_enough_tables_were_seen_only_the_cap_holds() -> None:
    patience = Patience(is_adaptive=True)
    for _ in range(15):
        patience.observe(0.005)
    assert patience.limit_seconds == float("inf")


def test_the_limit_follows_the_tables_and_leaves_room_for_slower_ones() -> None:
    patience = Patience(is_adaptive=True)
    for _ in range(64):
        patience.observe(0.010)
    assert 0.012 < patience.limit_seconds < 0.030


def test_a_round_without_tables_makes_the_latencies_worthless() -> None:
    patience = Patience(is_adaptive=True)
    for _ in range(64):
        patience.observe(0.010)
    patience.forget()
    assert patience.limit_seconds == float("inf")


def test_a_fixed_deadline_never_moves() -> None:
    patience = Patience(is_adaptive=False)
    for _ in range(64):
        patience.observe(0.010)
    assert patience.limit_seconds == float("inf")
    assert patience.median_seconds == pytest.approx(0.010)


def fall_late(quarantine: Quarantine, now: float) -> bool:
    return [quarantine.note_round(now, any_in_time=False) for _ in range(3)][-1]


def test_the_third_late_round_in_a_row_begins_a_quarantine() -> None:
    quarantine = Quarantine(is_enabled=True)
    assert not quarantine.note_round(1.0, any_in_time=False)
    assert not quarantine.note_round(1.0, any_in_time=False)
    assert not quarantine.note_round(1.0, any_in_time=True)
    assert fall_late(quarantine, 1.0)
    assert quarantine.is_active(1.0 + FIRST_QUARANTINE_SECONDS - 0.01)
    assert not quarantine.is_active(1.0 + FIRST_QUARANTINE_SECONDS)


def test_quarantines_double_up_to_a_minute() -> None:
    quarantine = Quarantine(is_enabled=True)
    lengths = []
    for _ in range(6):
        assert fall_late(quarantine, 0.0)
        lengths.append(quarantine.until)
    assert lengths == [5.0, 10.0, 20.0, 40.0, 60.0, LONGEST_QUARANTINE_SECONDS]


def test_a_link_that_has_long_been_in_time_starts_with_a_clean_sheet() -> None:
    quarantine = Quarantine(is_enabled=True)
    fall_late(quarantine, 0.0)
    for _ in range(FORGIVEN_AFTER_ROUNDS):
        quarantine.note_round(100.0, any_in_time=True)
    fall_late(quarantine, 200.0)
    assert quarantine.until == 200.0 + FIRST_QUARANTINE_SECONDS


def test_a_link_can_be_left_alone_without_late_rounds() -> None:
    quarantine = Quarantine(is_enabled=True)
    assert quarantine.begin(1.0)
    assert quarantine.until == 1.0 + FIRST_QUARANTINE_SECONDS
    assert fall_late(quarantine, 100.0)
    assert quarantine.until == 100.0 + 2 * FIRST_QUARANTINE_SECONDS
    assert not Quarantine(is_enabled=False).begin(1.0)


def test_an_opening_may_take_longer_the_more_there_is_to_prefill() -> None:
    assert opening_seconds(0) == 5.0
    assert opening_seconds(2000) == 15.0


def test_without_quarantine_a_late_link_stays_in_service() -> None:
    quarantine = Quarantine(is_enabled=False)
    assert not any(fall_late(quarantine, 0.0) for _ in range(4))
    assert not quarantine.is_active(0.0)
