"""Rounds, tokens and times of one sequence, for the statistics and the spans of its request."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from ssd.pool.rounds import RoundResult
from ssd.speculation.round_record import RoundRecord
from ssd.types import LookupResult, Mode, SpeculationStatistics


def _floats() -> "array[float]":
    return array("d")


def _nothing_counted() -> SpeculationStatistics:
    return SpeculationStatistics(mode=Mode.AUTOREGRESSIVE)


@dataclass(slots=True)
class SequenceRecord:
    """What the rounds of a sequence did. Times are those of the clock in seconds, 0 before them.

    The step thread writes it. The asyncio loop reads the times.
    """

    arrived_at: float = 0.0
    admitted_at: float = 0.0
    """It left the queue. A sequence that is preempted and admitted again keeps its first time."""
    decoding_at: float = 0.0
    """Its first round began: the prompt is stored."""
    first_token_at: float = 0.0
    """Its first token was chosen."""
    last_token_at: float = 0.0
    decided_at: float = 0.0
    """The outcomes of its newest round were known."""
    newest_lookup: LookupResult = LookupResult.NONE
    """It selected the proposal of the next round."""
    _statistics: SpeculationStatistics = field(default_factory=_nothing_counted)
    """Without times until the end."""
    _begun_at: "array[float]" = field(default_factory=_floats)
    _verify_seconds: "array[float]" = field(default_factory=_floats)

    @property
    def num_rounds(self) -> int:
        """Rounds in which it took part."""
        return len(self._begun_at)

    def add_round(
        self, record: RoundRecord, result: RoundResult, now: float, *, is_paused: bool = False
    ) -> None:
        """Add a round whose tokens are chosen.

        ``is_paused``: the controller had turned its speculation off.
        """
        if not self._begun_at:
            self.decoding_at = record.stored_at
            self.first_token_at = now
        self._begun_at.append(record.begun_at)
        self._verify_seconds.append(record.verify_seconds)
        self.decided_at = record.decided_at
        self.last_token_at = now
        counts = self._statistics
        counts.rounds += 1
        counts.proposed_tokens += result.num_proposed
        counts.accepted_tokens += min(result.outcome.accepted, len(result.token_ids))
        counts.paused_rounds += is_paused

    def add_lookup(self, result: LookupResult) -> None:
        """Add the lookup of a round that did not end it."""
        self.newest_lookup = result
        counts = self._statistics
        counts.hits += result is LookupResult.HIT
        counts.misses += result is LookupResult.MISS
        counts.late += result is LookupResult.LATE

    def statistics(self, *, is_synchronous: bool) -> SpeculationStatistics:
        """Return the statistics of the request; called in the round that ends the sequence."""
        found = self._statistics
        if self._begun_at:
            found.verify_seconds = float(np.median(self._verify_seconds))
            gaps = np.diff(self._begun_at)
            found.round_seconds = (
                float(np.median(gaps)) if gaps.size else self.decided_at - self._begun_at[0]
            )
        if found.hits or found.misses or found.late:
            found.mode = Mode.SPECULATIVE
        elif is_synchronous and found.proposed_tokens:
            found.mode = Mode.SYNCHRONOUS
        found.time_to_first_token_seconds = max(0.0, self.first_token_at - self.arrived_at)
        found.wall_seconds = max(0.0, self.last_token_at - self.arrived_at)
        found.decode_seconds = max(0.0, self.last_token_at - self.first_token_at)
        return found
