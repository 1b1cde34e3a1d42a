"""The counts of one request, which its last message reports. Step thread."""

from dataclasses import dataclass, field

from ssd.pool.round_log import RoundLog
from ssd.pool.rounds import LookupCounts
from ssd.types import Mode, SpeculationStatistics


@dataclass(slots=True)
class RequestStatistics:
    """Rounds, tokens and times of one sequence."""

    arrived_at: float
    is_synchronous: bool = False
    first_round: int = -1
    rounds: int = 0
    lookups: LookupCounts = field(default_factory=LookupCounts)
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    paused_rounds: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    def note_round(self, round_index: int, proposed: int, accepted: int, now: float) -> None:
        """Count a round in which the sequence took part."""
        if self.rounds == 0:
            self.first_round = round_index
            self.first_token_at = now
        self.rounds += 1
        self.proposed_tokens += proposed
        self.accepted_tokens += accepted
        self.last_token_at = now

    def statistics(self, round_log: RoundLog) -> SpeculationStatistics:
        """Return the statistics of the request; called in the round that ends the sequence."""
        verify_seconds = round_seconds = 0.0
        if self.rounds:
            verify_seconds, round_seconds = round_log.medians(self.first_round)
        return SpeculationStatistics(
            mode=self._mode,
            rounds=self.rounds,
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

    @property
    def _mode(self) -> Mode:
        """The mode in which the rounds ran."""
        if self.lookups.total:
            return Mode.SPECULATIVE
        is_drafted = self.is_synchronous and self.proposed_tokens > 0
        return Mode.SYNCHRONOUS if is_drafted else Mode.AUTOREGRESSIVE
