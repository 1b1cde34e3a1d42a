"""Which proposed tokens stay, and which token follows them."""

import torch
from torch import Tensor

from ssd.speculation.outcome import Outcomes


def verify_coupled(proposal_BK: Tensor, num_proposed_B: Tensor, chosen_BP: Tensor) -> Outcomes:
    """Keep each proposal up to the first token the target would not have said itself.

    Under coupled sampling the target's choice is exact at every row, so there is no ratio and no
    residual: the choice after the longest agreeing prefix is the bonus token.

    Args:
        proposal_BK: int64 ids; columns from ``num_proposed_B`` on are padding, never accepted.
        num_proposed_B: int64, 0..K; 0 is plain decoding.
        chosen_BP: int64, the target's own choice at rows 0..K.

    Returns:
        ``accepted_B`` (0..num_proposed) and ``bonus_B``, int64, same device, no synchronisation.

    Source: arXiv 2408.07978 (shared noise).
    """
    column_K = torch.arange(proposal_BK.shape[1], device=proposal_BK.device)
    agrees_BK = (proposal_BK == chosen_BP[:, :-1]) & (column_K < num_proposed_B[:, None])
    accepted_B = agrees_BK.long().cumprod(dim=1).sum(dim=1)
    return Outcomes(accepted_B, bonus_B=chosen_BP.gather(1, accepted_B[:, None]).squeeze(1))
