"""What a request is told about its rounds."""

import pytest

from ssd.types import LookupResult, Mode
from ssd_target.decoding.request_statistics import RequestStatistics, RoundLog


def rounds(log: RoundLog, starts: list[float], verify_seconds: float) -> None:
    for start in starts:
        log.begin(start)
        log.verified(verify_seconds, start + verify_seconds + 0.001)


def test_medians_are_those_of_the_sequences_own_rounds() -> None:
    log = RoundLog()
    rounds(log, [0.0, 1.0], verify_seconds=0.9)
    first = log.num_rounds
    rounds(log, [2.0, 2.03, 2.06, 2.09], verify_seconds=0.02)
    verify_seconds, round_seconds = log.medians(first)
    assert verify_seconds == pytest.approx(0.02)
    assert round_seconds == pytest.approx(0.03)


def test_a_single_round_lasts_from_its_start_to_its_tokens() -> None:
    log = RoundLog()
    rounds(log, [5.0], verify_seconds=0.02)
    assert log.medians(0) == pytest.approx((0.02, 0.021))


def test_rounds_beyond_the_log_are_forgotten_not_mixed_up() -> None:
    log = RoundLog()
    rounds(log, [float(index) for index in range(70_000)], verify_seconds=0.5)
    assert log.medians(0) == pytest.approx((0.5, 1.0))


def test_a_request_that_never_looked_anything_up_ran_autoregressively() -> None:
    log = RoundLog()
    rounds(log, [1.0], verify_seconds=0.02)
    request_statistics = RequestStatistics(arrived_at=0.5)
    request_statistics.note_round(0, proposed=0, accepted=0, now=1.1)
    request_statistics.note_lookup(LookupResult.NONE)
    statistics = request_statistics.statistics(log)
    assert statistics.mode is Mode.AUTOREGRESSIVE
    assert statistics.time_to_first_token_seconds == pytest.approx(0.6)


def test_hits_misses_and_late_tables_are_told_apart() -> None:
    log = RoundLog()
    request_statistics = RequestStatistics(arrived_at=0.0)
    for index, result in enumerate(
        [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS, LookupResult.LATE]
    ):
        rounds(log, [float(index)], verify_seconds=0.02)
        request_statistics.note_round(index, proposed=6, accepted=4, now=index + 0.1)
        request_statistics.note_lookup(result)
    statistics = request_statistics.statistics(log)
    assert (statistics.hits, statistics.misses, statistics.late) == (2, 1, 1)
    assert (statistics.proposed_tokens, statistics.accepted_tokens) == (24, 16)
    assert statistics.mode is Mode.SPECULATIVE


def test_a_request_cancelled_before_its_first_token_has_zeros() -> None:
    statistics = RequestStatistics(arrived_at=3.0).statistics(RoundLog())
    assert (statistics.rounds, statistics.wall_seconds, statistics.round_seconds) == (0, 0.0, 0.0)
