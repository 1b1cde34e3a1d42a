"""The outcomes of verification for a batch of sequences."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One outcome (k, t*) for each sequence; both int64 of shape [B] on one device."""

    accepted_B: Tensor
    """k: accepted length, the number of leading proposed tokens that equal the target's choice."""
    bonus_B: Tensor
    """t*: bonus token, the target's choice after them."""
