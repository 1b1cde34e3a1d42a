"""The result of one sequence in one round, and the lookup of its outcome."""

from dataclasses import dataclass, field

from ssd.types import Branch, Explicit, LookupResult, Outcome, TokenId
from ssd_target.decoding.sequence import Emission, Sequence


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of one sequence in one round."""

    sequence: Sequence
    base_len: int
    """Committed tokens before the round."""
    num_proposed: int
    outcome: Outcome
    emission: Emission
    max_proposed: int
    """Largest number of tokens of the next proposal that the controller allows."""

    def max_tokens(self, lookahead: int) -> int:
        """Return the maximum number of tokens of the next proposal."""
        return min(lookahead, self.max_proposed, self.sequence.num_remaining - 1)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The lookup of one outcome: its result and the next proposal.

    ``tokens`` is the next proposal; ``next`` describes it to the draft.
    """

    result: LookupResult = LookupResult.NONE
    next: Branch | Explicit = field(default_factory=Explicit)
    tokens: tuple[TokenId, ...] = ()
    num_from_table: int = 0
    """Tokens that are from a table; they come first."""


NO_TABLE_NEEDED = Lookup()
NO_DRAFT = Lookup(LookupResult.NO_DRAFT)


@dataclass(slots=True)
class LookupCounts:
    """Number of lookups by result: of a request, a link or the process."""

    hits: int = 0
    misses: int = 0
    late: int = 0

    def note(self, result: LookupResult) -> None:
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
