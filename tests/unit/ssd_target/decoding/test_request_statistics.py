"""Statistics that a request reports."""

import pytest

from ssd.pool.round_log import RoundLog
from ssd.types import LookupResult, Mode
from ssd_target.decoding.request_statistics import RequestStatistics


def test_a_request_without_lookups_ran_autoregressively() -> None:
    log = RoundLog()
    log.begin(1.0)
    log.note_outcomes(0.02, 1.021)
    request_statistics = RequestStatistics(arrived_at=0.5)
    request_statistics.note_round(0, proposed=0, accepted=0, now=1.1)
    request_statistics.lookups.note(LookupResult.NONE)
    statistics = request_statistics.statistics(log)
    assert statistics.mode is Mode.AUTOREGRESSIVE
    assert statistics.time_to_first_token_seconds == pytest.approx(0.6)


def test_hits_misses_and_late_tables_are_counted_separately() -> None:
    log = RoundLog()
    request_statistics = RequestStatistics(arrived_at=0.0)
    for index, result in enumerate(
        [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS, LookupResult.LATE]
    ):
        log.begin(float(index))
        log.note_outcomes(0.02, index + 0.021)
        request_statistics.note_round(index, proposed=6, accepted=4, now=index + 0.1)
        request_statistics.lookups.note(result)
    statistics = request_statistics.statistics(log)
    assert (statistics.hits, statistics.misses, statistics.late) == (2, 1, 1)
    assert (statistics.proposed_tokens, statistics.accepted_tokens) == (24, 16)
    assert statistics.mode is Mode.SPECULATIVE


def test_a_request_cancelled_before_its_first_token_reports_zeros() -> None:
    statistics = RequestStatistics(arrived_at=3.0).statistics(RoundLog())
    assert (statistics.rounds, statistics.wall_seconds, statistics.round_seconds) == (0, 0.0, 0.0)
