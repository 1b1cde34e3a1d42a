"""Verification: how many proposed tokens are accepted, and the bonus token after them."""

import torch
from torch import Tensor

from ssd.speculation.outcome import Outcomes


def verify_coupled(proposal_BK: Tensor, num_proposed_B: Tensor, chosen_BP: Tensor) -> Outcomes:
    """Accept proposed tokens up to the first token that differs from the target's choice.

    With coupled sampling, ``chosen_BP`` is exact at every row. No acceptance ratio or residual is
    needed. The choice after the accepted prefix is the bonus token.

    Args:
        proposal_BK: int64 token ids. Tokens from index ``num_proposed`` on are padding.
        num_proposed_B: int64, 0..K. 0 means plain decoding.
        chosen_BP: int64, the target's choice at rows 0..K.

    Returns:
        ``accepted_B`` (0..num_proposed) and ``bonus_B``, int64, on the same device, without a
        synchronisation.

    Source: arXiv 2408.07978 (shared noise).
    """
    index_K = torch.arange(proposal_BK.shape[1], device=proposal_BK.device)
    agrees_BK = (proposal_BK == chosen_BP[:, :-1]) & (index_K < num_proposed_B[:, None])
    accepted_B = agrees_BK.long().cumprod(dim=1).sum(dim=1)
    return Outcomes(accepted_B, bonus_B=chosen_BP.gather(1, accepted_B[:, None]).squeeze(1))
