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


@dataclass(frozen=True, slots=True)
class Lookup:
    """The lookup of one outcome: its result and the next proposal.

    ``tokens`` is the next proposal; ``next`` describes it to the draft.
    """

    result: LookupResult = LookupResult.NONE
    next: Branch | Explicit = field(default_factory=Explicit)
    tokens: tuple[TokenId, ...] = ()


NO_TABLE_NEEDED = Lookup()
NO_DRAFT = Lookup(LookupResult.NO_DRAFT)
