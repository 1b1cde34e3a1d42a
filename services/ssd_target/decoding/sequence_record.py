"""Rounds, tokens and times of one sequence, for the statistics and the spans of its request."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from ssd.pool.rounds import LookupCounts, RoundResult
from ssd.speculation.round_record import RoundRecord
from ssd.types import LookupResult, Mode, SpeculationStatistics


def _floats() -> "array[float]":
    return array("d")


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
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    paused_rounds: int = 0
    """Rounds for which the controller had turned its speculation off."""
    lookups: LookupCounts = field(default_factory=LookupCounts)
    newest_lookup: LookupResult = LookupResult.NONE
    """It selected the proposal of the next round."""
    _begun_at: "array[float]" = field(default_factory=_floats)
    _verify_seconds: "array[float]" = field(default_factory=_floats)

    @property
    def num_rounds(self) -> int:
        """Rounds in which it took part."""
        return len(self._begun_at)

    def add_round(self, record: RoundRecord, result: RoundResult, now: float) -> None:
        """Add a round whose tokens are chosen."""
        if not self._begun_at:
            self.decoding_at = record.stored_at
            self.first_token_at = now
        self._begun_at.append(record.begun_at)
        self._verify_seconds.append(record.verify_seconds)
        self.decided_at = record.decided_at
        self.last_token_at = now
        self.proposed_tokens += result.num_proposed
        self.accepted_tokens += min(result.outcome.accepted, len(result.token_ids))

    def add_lookup(self, result: LookupResult) -> None:
        """Add the lookup of a round that did not end it."""
        self.newest_lookup = result
        self.lookups.add(result)

    def statistics(self, *, is_synchronous: bool) -> SpeculationStatistics:
        """Return the statistics of the request; called in the round that ends the sequence."""
        verify_seconds = round_seconds = 0.0
        if self._begun_at:
            verify_seconds = float(np.median(self._verify_seconds))
            gaps = np.diff(self._begun_at)
            round_seconds = (
                float(np.median(gaps)) if gaps.size else self.decided_at - self._begun_at[0]
            )
        mode = Mode.AUTOREGRESSIVE
        if self.lookups.total:
            mode = Mode.SPECULATIVE
        elif is_synchronous and self.proposed_tokens:
            mode = Mode.SYNCHRONOUS
        return SpeculationStatistics(
            mode=mode,
            rounds=self.num_rounds,
            hits=self.lookups.hits,
            misses=self.lookups.misses,
            late=self.lookups.late,
            proposed_tokens=self.proposed_tokens,
            accepted_tokens=self.accepted_tokens,
            paused_rounds=self.paused_rounds,
            time_to_first_token_seconds=max(0.0, self.first_token_at - self.arrived_at),
            wall_seconds=max(0.0, self.last_token_at - self.arrived_at),
            decode_seconds=max(0.0, self.last_token_at - self.first_token_at),
            verify_seconds=verify_seconds,
            round_seconds=round_seconds,
        )
