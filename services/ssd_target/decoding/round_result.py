"""What a round decides on a sequence, and what follows from it."""

from dataclasses import dataclass, field

from ssd.types import Branch, Explicit, LookupResult, Outcome, TokenId
from ssd_target.decoding.sequence import Emission, Sequence


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round decided on one sequence."""

    sequence: Sequence
    base_len: int
    """Committed tokens before the round."""
    num_proposed: int
    outcome: Outcome
    emission: Emission


@dataclass(frozen=True, slots=True)
class Lookup:
    """What follows from a result: the next proposal and where it comes from."""

    result: LookupResult = LookupResult.NONE
    next: Branch | Explicit = field(default_factory=Explicit)
    tokens: tuple[TokenId, ...] = ()


NOTHING_FOUND = Lookup()
WITHOUT_DRAFT = Lookup(LookupResult.NO_DRAFT)
