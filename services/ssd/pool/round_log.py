"""Counts and times of rounds, kept in one place.

The statistics of a request and the status of the pool are computed from it. Prometheus metrics are
not: ``metrics`` observes the same rounds beside it, and nothing reads a metric.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssd.pool.time_mean import TimeMean
from ssd.speculation.controller import Reason, Report

_ROUNDS_KEPT = 1 << 16
_RECENT_ROUNDS = 256


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """Sequences that the scheduler of a target holds."""

    running: int = 0
    waiting: int = 0
    eligible: int = 0
    """Running sequences that speculate, with or without a draft: those in mode SPECULATIVE, and
    those in mode AUTO unless it has turned speculation off."""


class RoundLog:
    """Times and sizes of the newest 65,536 rounds, and the counts of the scheduler.

    The step thread writes. Any thread may read ``counts``, ``speculation``, ``mean_eligible`` and
    the properties, which describe the newest 256 complete rounds and are 0 before the first one.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        """Rounds that have begun; the newest one has the index before it."""
        self.counts = SequenceCounts()
        """Sequences that the scheduler holds now."""
        self.speculation = Report(is_on=True, reason=Reason.MEASURING, speed_up=0.0, max_proposed=0)
        """Choice of the controller."""
        self._num_complete = 0
        self._eligible = TimeMean()
        self._begun_at = np.zeros(_ROUNDS_KEPT)
        self._decided_at = np.zeros(_ROUNDS_KEPT)
        self._verify_seconds = np.zeros(_ROUNDS_KEPT)
        self._seconds = np.zeros(_ROUNDS_KEPT)
        self._num_sequences = np.zeros(_ROUNDS_KEPT, dtype=np.int64)
        self._num_tokens = np.zeros(_ROUNDS_KEPT, dtype=np.int64)

    def note_counts(self, counts: SequenceCounts, now: float) -> None:
        """Keep the counts of the scheduler, which have changed."""
        self.counts = counts
        self._eligible.note(counts.eligible, now)

    def begin(self, now: float) -> None:
        """Note that a round begins."""
        self._begun_at[self.num_rounds % _ROUNDS_KEPT] = now
        self.num_rounds += 1

    def note_outcomes(self, verify_seconds: float, now: float) -> None:
        """Note that the outcomes of the round exist, and the duration of its forward pass."""
        index = (self.num_rounds - 1) % _ROUNDS_KEPT
        self._verify_seconds[index] = verify_seconds
        self._decided_at[index] = now

    def end(self, seconds: float, num_sequences: int, num_tokens: int) -> None:
        """Note that the round is complete.

        Args:
            seconds: T_round, from the begin to the end.
            num_sequences: rows of the round.
            num_tokens: tokens that they emitted together.
        """
        index = (self.num_rounds - 1) % _ROUNDS_KEPT
        self._seconds[index] = seconds
        self._num_sequences[index] = num_sequences
        self._num_tokens[index] = num_tokens
        self._num_complete = self.num_rounds

    def medians(self, first_round: int) -> tuple[float, float]:
        """Return median seconds of (forward pass, begin to begin) from ``first_round`` to now.

        A sequence takes part in consecutive rounds, so its first one selects all of its own.
        """
        index = _newest(min(self.num_rounds - first_round, _ROUNDS_KEPT), self.num_rounds)
        if not index.size:
            return 0.0, 0.0
        begun_at = self._begun_at[index]
        seconds = np.diff(begun_at) if index.size > 1 else self._decided_at[index] - begun_at
        return float(np.median(self._verify_seconds[index])), float(np.median(seconds))

    def mean_eligible(self, now: float) -> float:
        """Return the mean number of eligible sequences over the last 30 s."""
        return self._eligible.mean(now)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a sequence gained in a round, mean."""
        index = self._recent
        num_sequences = int(self._num_sequences[index].sum())
        return int(self._num_tokens[index].sum()) / num_sequences if num_sequences else 0.0

    @property
    def verify_seconds(self) -> float:
        """T_verify, median."""
        index = self._recent
        return float(np.median(self._verify_seconds[index])) if index.size else 0.0

    @property
    def efficiency(self) -> float:
        """T_verify / T_round, of medians."""
        index = self._recent
        seconds = float(np.median(self._seconds[index])) if index.size else 0.0
        return self.verify_seconds / seconds if seconds > 0 else 0.0

    @property
    def _recent(self) -> NDArray[np.int64]:
        return _newest(min(self._num_complete, _RECENT_ROUNDS), self._num_complete)


def _newest(count: int, end: int) -> NDArray[np.int64]:
    """Return the places of the ``count`` rounds before ``end``."""
    return np.arange(end - max(0, count), end) % _ROUNDS_KEPT
