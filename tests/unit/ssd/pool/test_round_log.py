"""Medians and means of rounds."""

import pytest

from ssd.pool.round_log import RoundLog, SequenceCounts


def run_rounds(log: RoundLog, starts: list[float], verify_seconds: float) -> None:
    for start in starts:
        log.begin(start)
        log.note_outcomes(verify_seconds, start + verify_seconds + 0.001)


def run_round(
    log: RoundLog, sequences: int, tokens: int, verify_seconds: float, round_seconds: float
) -> None:
    log.begin(0.0)
    log.note_outcomes(verify_seconds, verify_seconds)
    log.end(round_seconds, num_sequences=sequences, num_tokens=tokens)


def test_medians_cover_the_rounds_of_the_sequence() -> None:
    log = RoundLog()
    run_rounds(log, [0.0, 1.0], verify_seconds=0.9)
    first = log.num_rounds
    run_rounds(log, [2.0, 2.03, 2.06, 2.09], verify_seconds=0.02)
    verify_seconds, round_seconds = log.medians(first)
    assert verify_seconds == pytest.approx(0.02)
    assert round_seconds == pytest.approx(0.03)


def test_a_single_round_lasts_from_its_begin_to_its_tokens() -> None:
    log = RoundLog()
    run_rounds(log, [5.0], verify_seconds=0.02)
    assert log.medians(0) == pytest.approx((0.02, 0.021))


def test_rounds_older_than_the_log_do_not_count() -> None:
    log = RoundLog()
    run_rounds(log, [float(index) for index in range(70_000)], verify_seconds=0.5)
    assert log.medians(0) == pytest.approx((0.5, 1.0))


def test_tokens_per_round_are_those_of_one_sequence() -> None:
    log = RoundLog()
    assert (log.tokens_per_round, log.verify_seconds, log.efficiency) == (0.0, 0.0, 0.0)
    run_round(log, 1, 4, 0.002, 0.002)
    run_round(log, 3, 4, 0.008, 0.1)
    run_round(log, 1, 1, 0.003, 0.004)
    assert log.tokens_per_round == pytest.approx(9 / 5)
    assert log.verify_seconds == 0.003
    assert log.efficiency == pytest.approx(0.003 / 0.004)


def test_recent_figures_cover_256_rounds() -> None:
    log = RoundLog()
    run_round(log, 1, 100, 9.0, 90.0)
    for _ in range(256):
        run_round(log, 2, 6, 0.004, 0.005)
    assert (log.tokens_per_round, log.verify_seconds) == (3.0, 0.004)
    assert log.efficiency == pytest.approx(0.8)


def test_a_round_in_progress_does_not_count_in_recent_figures() -> None:
    log = RoundLog()
    run_round(log, 2, 6, 0.004, 0.005)
    run_rounds(log, [1.0], verify_seconds=9.0)
    assert (log.tokens_per_round, log.verify_seconds) == (3.0, 0.004)


def test_eligible_sequences_are_a_mean_over_time() -> None:
    log = RoundLog()
    assert log.mean_eligible(1.0) == 0.0
    log.note_counts(SequenceCounts(running=4, eligible=3), 0.0)
    log.note_counts(SequenceCounts(running=1, eligible=1), 1.0)
    assert log.counts.running == 1
    assert log.mean_eligible(2.0) == pytest.approx(2.0)
