"""Statistics that a request reports."""

from dataclasses import replace

import pytest

from ssd.pool.rounds import RoundResult
from ssd.speculation.round_record import RoundRecord
from ssd.types import LookupResult, Mode, Outcome
from ssd_target.decoding.sequence import SequenceRecord

RESULT = RoundResult(
    1, (7,) * 5, 6, Outcome(accepted=4, bonus=7), is_finished=False, max_proposed=6
)


def run_rounds(subject: SequenceRecord, *rounds: tuple[float, float]) -> None:
    """Add rounds with these begins and times of their verifies."""
    for begun_at, verify_seconds in rounds:
        decided_at = begun_at + verify_seconds + 0.001
        record = RoundRecord(
            begun_at=begun_at, verify_seconds=verify_seconds, decided_at=decided_at
        )
        subject.add_round(record, RESULT)


def test_a_request_without_lookups_ran_autoregressively() -> None:
    subject = SequenceRecord(arrived_at=0.5)
    run_rounds(subject, (1.0, 0.099))
    subject.add_lookup(LookupResult.NONE)
    statistics = subject.statistics(is_synchronous=False)
    assert statistics.mode is Mode.AUTOREGRESSIVE
    assert statistics.time_to_first_token_seconds == pytest.approx(0.6)
    assert subject.statistics(is_synchronous=True).mode is Mode.SYNCHRONOUS


def test_hits_misses_and_late_tables_are_counted_separately() -> None:
    subject = SequenceRecord()
    for result in [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS, LookupResult.LATE]:
        run_rounds(subject, (1.0, 0.02))
        subject.add_lookup(result)
    statistics = subject.statistics(is_synchronous=False)
    assert (statistics.hits, statistics.misses, statistics.late) == (2, 1, 1)
    assert (statistics.proposed_tokens, statistics.accepted_tokens) == (24, 16)
    assert (statistics.rounds, statistics.mode) == (4, Mode.SPECULATIVE)


def test_rounds_of_the_backup_are_speculative_and_need_no_table() -> None:
    subject = SequenceRecord()
    run_rounds(subject, (1.0, 0.02))
    subject.add_lookup(LookupResult.BACKUP)
    statistics = subject.statistics(is_synchronous=False)
    assert (statistics.hits, statistics.misses, statistics.late) == (0, 0, 0)
    assert (statistics.backup_rounds, statistics.mode) == (1, Mode.SPECULATIVE)


def test_accepted_tokens_after_the_end_of_the_text_do_not_count() -> None:
    subject = SequenceRecord()
    subject.add_round(RoundRecord(), replace(RESULT, token_ids=(7, 7)))
    assert subject.statistics(is_synchronous=False).accepted_tokens == 2


def test_times_of_rounds_are_medians() -> None:
    subject = SequenceRecord()
    run_rounds(subject, (2.0, 0.02), (2.03, 0.02), (2.06, 0.9), (2.99, 0.02))
    statistics = subject.statistics(is_synchronous=False)
    assert statistics.verify_seconds == pytest.approx(0.02)
    assert statistics.round_seconds == pytest.approx(0.03)


def test_a_single_round_lasts_from_its_begin_to_its_tokens() -> None:
    subject = SequenceRecord()
    run_rounds(subject, (5.0, 0.02))
    statistics = subject.statistics(is_synchronous=False)
    assert (statistics.verify_seconds, statistics.round_seconds) == pytest.approx((0.02, 0.021))


def test_a_request_cancelled_before_its_first_token_reports_zeros() -> None:
    statistics = SequenceRecord(arrived_at=3.0).statistics(is_synchronous=False)
    assert (statistics.rounds, statistics.wall_seconds, statistics.round_seconds) == (0, 0.0, 0.0)
