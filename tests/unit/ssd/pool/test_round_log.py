"""Means and medians of the newest rounds."""

import pytest

from ssd.pool.round_log import RoundLog, SequenceCounts
from ssd.speculation.round_record import RoundRecord


def record(sequences: int, tokens: int, verify_seconds: float, seconds: float) -> RoundRecord:
    return RoundRecord(
        num_sequences=sequences, num_tokens=tokens, verify_seconds=verify_seconds, seconds=seconds
    )


def test_tokens_per_round_are_those_of_one_sequence() -> None:
    log = RoundLog()
    assert (log.tokens_per_round, log.verify_seconds, log.efficiency) == (0.0, 0.0, 0.0)
    log.add_round(record(1, 4, 0.002, 0.002))
    log.add_round(record(3, 4, 0.008, 0.1))
    log.add_round(record(1, 1, 0.003, 0.004))
    assert log.tokens_per_round == pytest.approx(9 / 5)
    assert log.verify_seconds == 0.003
    assert log.efficiency == pytest.approx(0.003 / 0.004)


def test_figures_cover_256_rounds() -> None:
    log = RoundLog()
    log.add_round(record(1, 100, 9.0, 90.0))
    for _ in range(256):
        log.add_round(record(2, 6, 0.004, 0.005))
    assert (log.tokens_per_round, log.verify_seconds) == (3.0, 0.004)
    assert log.efficiency == pytest.approx(0.8)


def test_eligible_sequences_are_a_mean_over_time() -> None:
    log = RoundLog()
    assert log.mean_eligible(1.0) == 0.0
    log.set_counts(SequenceCounts(running=4, eligible=3), 0.0)
    log.set_counts(SequenceCounts(running=1, eligible=1), 1.0)
    assert log.counts.running == 1
    assert log.mean_eligible(2.0) == pytest.approx(2.0)
