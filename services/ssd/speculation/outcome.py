"""What verification decided on a batch of sequences."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One outcome (k, t*) a sequence; both int64 of shape [B] on one device."""

    accepted_B: Tensor
    """k: leading proposed tokens that the target would have said itself, 0..m."""
    bonus_B: Tensor
    """t*: the target's own token after them."""
