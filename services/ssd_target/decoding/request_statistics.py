"""What is counted and timed: the rounds, and one sequence's share of them. Step thread."""

from dataclasses import dataclass

import numpy as np

from ssd.types import LookupResult, Mode, SpeculationStatistics

_ROUNDS_KEPT = 1 << 16


class RoundLog:
    """When rounds began and how long their forward pass took; the newest 65,536 are kept.

    A sequence takes part in consecutive rounds, so that two numbers are enough to find its own.
    """

    def __init__(self) -> None:
        self._starts = np.zeros(_ROUNDS_KEPT)
        self._ends = np.zeros(_ROUNDS_KEPT)
        self._verify_seconds = np.zeros(_ROUNDS_KEPT)
        self.num_rounds = 0
        """Rounds so far; the round in progress is the one before it."""

    def begin(self, now: float) -> None:
        """A round begins."""
        self._starts[self.num_rounds % _ROUNDS_KEPT] = now
        self.num_rounds += 1

    def verified(self, seconds: float, now: float) -> None:
        """The forward pass of the round in progress took this long, and its tokens are known."""
        index = (self.num_rounds - 1) % _ROUNDS_KEPT
        self._verify_seconds[index] = seconds
        self._ends[index] = now

    def medians(self, first_round: int) -> tuple[float, float]:
        """Median seconds of (forward pass, start to start) from ``first_round`` to now."""
        count = min(self.num_rounds - first_round, _ROUNDS_KEPT)
        if count <= 0:
            return 0.0, 0.0
        index = np.arange(self.num_rounds - count, self.num_rounds) % _ROUNDS_KEPT
        starts = self._starts[index]
        lasting = np.diff(starts) if count > 1 else self._ends[index] - starts
        return float(np.median(self._verify_seconds[index])), float(np.median(lasting))


@dataclass(slots=True)
class RequestStatistics:
    """What speculation did for one sequence."""

    arrived_at: float
    first_round: int = -1
    rounds: int = 0
    hits: int = 0
    misses: int = 0
    late: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    def note_round(self, round_index: int, proposed: int, accepted: int, now: float) -> None:
        """A round gave this sequence its tokens."""
        if self.rounds == 0:
            self.first_round = round_index
            self.first_token_at = now
        self.rounds += 1
        self.proposed_tokens += proposed
        self.accepted_tokens += accepted
        self.last_token_at = now

    def note_lookup(self, result: LookupResult) -> None:
        """The outcome of the round was looked up."""
        self.hits += result is LookupResult.HIT
        self.misses += result is LookupResult.MISS
        self.late += result is LookupResult.LATE

    def statistics(self, log: RoundLog) -> SpeculationStatistics:
        """The figures for the last message; called in the round that ends the sequence."""
        verify_seconds, round_seconds = log.medians(self.first_round) if self.rounds else (0.0, 0.0)
        was_speculative = self.hits + self.misses + self.late > 0
        return SpeculationStatistics(
            mode=Mode.SPECULATIVE if was_speculative else Mode.AUTOREGRESSIVE,
            rounds=self.rounds,
            hits=self.hits,
            misses=self.misses,
            late=self.late,
            proposed_tokens=self.proposed_tokens,
            accepted_tokens=self.accepted_tokens,
            time_to_first_token_seconds=max(0.0, self.first_token_at - self.arrived_at),
            wall_seconds=max(0.0, self.last_token_at - self.arrived_at),
            decode_seconds=max(0.0, self.last_token_at - self.first_token_at),
            verify_seconds=verify_seconds,
            round_seconds=round_seconds,
        )
