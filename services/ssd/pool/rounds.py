"""What a target gives to the pool, and what it gets: results of rounds, lookups."""

from dataclasses import KW_ONLY, dataclass

from ssd.speculation.sources import NO_CANDIDATES, Candidates
from ssd.types import LookupResult, Outcome, SequenceId, TokenId


@dataclass(slots=True)
class RoundResult:
    """The result of one sequence in one round; it need not have begun in the pool."""

    sequence_id: SequenceId
    token_ids: tuple[TokenId, ...]
    """Tokens that the round appended: all tokens of the outcome, or fewer if one ends the sequence.
    """
    num_proposed: int
    outcome: Outcome
    is_finished: bool
    max_proposed: int
    """Largest number of tokens of the next proposal that the target allows."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The lookup of one outcome: its result and the next proposal."""

    result: LookupResult = LookupResult.NONE
    tokens: tuple[TokenId, ...] = ()
    """The next proposal."""
    _: KW_ONLY
    num_from_table: int = 0
    """Tokens that are from a table; they come first."""
    is_branch: bool = False
    """Whether a branch of the table begins with all tokens of the next proposal."""
    candidates: Candidates = NO_CANDIDATES
    """What both sources propose."""


NO_TABLE_NEEDED = Lookup()
NO_DRAFT = Lookup(LookupResult.NO_DRAFT)


@dataclass(frozen=True, slots=True)
class PoolRound:
    """What the pool returns for a round."""

    lookups: list[Lookup]
    """The lookup of each result."""
    looked_up_at: float
    """When they were known; then the outcomes were sent."""


@dataclass(slots=True)
class LookupCounts:
    """Number of lookups by result: of a request, a link or the process."""

    hits: int = 0
    misses: int = 0
    late: int = 0

    def add(self, result: LookupResult) -> None:
        """Count one lookup."""
        self.hits += result is LookupResult.HIT
        self.misses += result is LookupResult.MISS
        self.late += result is LookupResult.LATE

    @property
    def total(self) -> int:
        """Lookups that needed a table."""
        return self.hits + self.misses + self.late

    @property
    def hit_rate(self) -> float:
        """Hits over lookups that needed a table; 0 before the first."""
        return self.hits / max(1, self.total)
