"""The result of one sequence in one round."""

from dataclasses import dataclass

from ssd.pool.rounds import VerifiedRound
from ssd.types import Outcome
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

    def verified(self) -> VerifiedRound:
        """Return what the pool needs of it."""
        return VerifiedRound(
            self.sequence.sequence_id,
            self.emission.token_ids,
            self.num_proposed,
            self.outcome,
            self.emission.finish_reason is not None,
            self.max_proposed,
        )
