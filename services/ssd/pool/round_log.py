"""The newest rounds and counts, from which the status of the pool is computed.

Prometheus metrics are separate: ``metrics`` observes the same rounds, and no code reads a metric.
"""

from collections import deque
from statistics import median
from typing import NamedTuple

from ssd.pool.time_mean import TimeMean
from ssd.speculation.controller import ControllerReport, Reason
from ssd.speculation.round_record import RoundRecord
from ssd.types import Mode

_RECENT_ROUNDS = 256


class SequenceCounts(NamedTuple):
    """Sequences that the scheduler of a target holds."""

    running: int = 0
    waiting: int = 0
    eligible: int = 0
    """Running sequences that speculate, with or without a draft: all in mode SPECULATIVE, and all
    in mode AUTO unless the controller has turned speculation off."""


class RoundLog:
    """The newest 256 rounds, the counts of the scheduler and the choice of the controller.

    The thread of the rounds writes, and any thread reads. Figures are 0 before the first round.
    """

    def __init__(self) -> None:
        self.counts = SequenceCounts()
        """Sequences that the scheduler holds now."""
        self.speculation = _fixed(is_on=True)
        """Choice of the controller."""
        self.auto_mode = Mode.AUTO
        """Mode of requests that arrive in mode AUTO."""
        self._eligible = TimeMean()
        self._rounds: deque[RoundRecord] = deque(maxlen=_RECENT_ROUNDS)

    def set_counts(self, counts: SequenceCounts, now: float) -> None:
        """Keep the counts of the scheduler, which have changed."""
        self.counts = counts
        self._eligible.set(counts.eligible, now)

    def add_round(self, record: RoundRecord) -> None:
        """Add a complete round."""
        self._rounds.append(record)

    def mean_eligible(self, now: float) -> float:
        """Return the mean number of eligible sequences over the last 30 s."""
        return self._eligible.mean(now)

    @property
    def auto_speculation(self) -> ControllerReport:
        """How requests that arrive in mode AUTO speculate: as the controller or their mode says."""
        if self.auto_mode is Mode.AUTO:
            return self.speculation
        return _fixed(is_on=self.auto_mode is not Mode.AUTOREGRESSIVE)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a sequence gained in a round, mean."""
        rounds = self._rounds.copy()
        num_sequences = sum(record.num_sequences for record in rounds)
        return sum(record.num_tokens for record in rounds) / max(1, num_sequences)

    @property
    def verify_seconds(self) -> float:
        """T_verify, median."""
        return median([record.verify_seconds for record in self._rounds.copy()] or [0.0])

    @property
    def efficiency(self) -> float:
        """T_verify / T_round, of medians."""
        seconds = median([record.seconds for record in self._rounds.copy()] or [0.0])
        return self.verify_seconds / seconds if seconds > 0 else 0.0


def _fixed(*, is_on: bool) -> ControllerReport:
    """Return a report without a measurement."""
    return ControllerReport(is_on, Reason.MEASURING, speed_up=0.0, max_proposed=0)
