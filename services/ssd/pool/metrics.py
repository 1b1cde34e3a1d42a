"""Prometheus metrics of rounds that every target has: lookups, acceptance, the controller's choice.

They observe what rounds did, and nothing reads them back.
"""

from collections.abc import Sequence as Rows
from typing import Protocol

from ssd import telemetry
from ssd.pool.rounds import Lookup
from ssd.speculation.controller import Reason, Report
from ssd.types import LookupResult, Mode, Outcome


class VerifiedRow(Protocol):
    """What a round verified of one sequence."""

    @property
    def num_proposed(self) -> int:
        """Tokens of its proposal."""
        ...

    @property
    def outcome(self) -> Outcome:
        """Result of the verification."""
        ...


class LookupMetrics:
    """Publishes lookups and acceptance. Labels are resolved once. Step thread only."""

    def __init__(self, lookahead: int) -> None:
        """Construct; ``lookahead`` is K, the tokens of a full proposal."""
        self._results = {
            result: telemetry.ROUNDS_TOTAL.labels(result=result.value) for result in LookupResult
        }
        self._accepted = [
            telemetry.ACCEPTED_TOKENS_TOTAL.labels(position=str(position))
            for position in range(1, lookahead + 1)
        ]

    def observe(self, rows: Rows[VerifiedRow], lookups: Rows[Lookup]) -> None:
        """Publish a round."""
        # Each call of a counter takes a lock, so it is called once for all rows.
        kinds: dict[LookupResult, int] = {}
        for lookup in lookups:
            kinds[lookup.result] = kinds.get(lookup.result, 0) + 1
        for kind, count in kinds.items():
            self._results[kind].inc(count)
        lengths = [each.outcome.accepted for each in rows if each.num_proposed]
        if lengths:
            telemetry.PROPOSED_TOKENS_TOTAL.inc(sum(each.num_proposed for each in rows))
            for position in range(max(lengths)):
                self._accepted[position].inc(sum(length > position for length in lengths))


def publish_report(report: Report) -> None:
    """Publish the choice of the controller."""
    telemetry.SPECULATION_ACTIVE.set(report.is_on)
    telemetry.SPECULATION_SPEED_UP.set(report.speed_up)
    telemetry.MAX_PROPOSED_TOKENS.set(report.max_proposed)
    for reason in Reason:
        telemetry.SPECULATION_REASON.labels(reason=reason.value).set(reason is report.reason)


def publish_mode(mode: Mode) -> None:
    """Publish the mode of requests that arrive in mode AUTO."""
    for each in Mode:
        telemetry.SPECULATION_MODE.labels(mode=str(each)).set(each is mode)
