"""Prometheus metrics of rounds: they observe what rounds did, and nothing reads them back."""

from collections.abc import Iterable
from operator import attrgetter

from ssd.observability import metrics
from ssd.pool.round_log import RoundLog
from ssd.speculation.controller import ControllerReport, Reason
from ssd.speculation.round_record import RoundRecord
from ssd.types import LookupResult, Mode


class RoundMetrics:
    """Publishes rounds. Labels are resolved once. Thread of the rounds only."""

    def __init__(self, lookahead: int, parts: Iterable[str]) -> None:
        """Construct.

        Args:
            lookahead: K, the tokens of a full proposal.
            parts: parts of a round that are measured, of ``PARTS`` and "host".
        """
        self._results = {
            result: metrics.ROUNDS_TOTAL.labels(result=result.value) for result in LookupResult
        }
        self._accepted = [
            metrics.ACCEPTED_TOKENS_TOTAL.labels(position=str(position))
            for position in range(1, lookahead + 1)
        ]
        self._seconds = [
            (attrgetter(f"{part}_seconds"), metrics.ROUND_SECONDS.labels(part=part))
            for part in parts
        ]

    def observe_tokens(self, record: RoundRecord) -> None:
        """Publish lookups and acceptance."""
        # Each call of a counter takes a lock, so it is called once for all sequences.
        for result, count in record.lookups.items():
            self._results[result].inc(count)
        if record.num_proposed:
            metrics.PROPOSED_TOKENS_TOTAL.inc(record.num_proposed)
            for counter, count in zip(self._accepted, record.num_accepted, strict=False):
                counter.inc(count)

    def observe_seconds(self, record: RoundRecord) -> None:
        """Publish how long the parts took."""
        for seconds, histogram in self._seconds:
            histogram.observe(seconds(record))


def publish_report(report: ControllerReport, log: RoundLog) -> None:
    """Publish the choice of the controller, also in the log, if it has changed."""
    if report == log.speculation:
        return
    log.speculation = report
    _publish_speculation(log)


def publish_mode(mode: Mode, log: RoundLog) -> None:
    """Publish the mode of requests that arrive in mode AUTO."""
    log.auto_mode = mode
    for label in Mode:
        metrics.SPECULATION_MODE.labels(mode=str(label)).set(label is mode)
    _publish_speculation(log)


def _publish_speculation(log: RoundLog) -> None:
    report = log.auto_speculation
    metrics.SPECULATION_ACTIVE.set(report.is_on)
    metrics.SPECULATION_SPEED_UP.set(report.speed_up)
    metrics.MAX_PROPOSED_TOKENS.set(report.max_proposed)
    for reason in Reason:
        metrics.SPECULATION_REASON.labels(reason=reason.value).set(reason is report.reason)
