"""Verification: how many proposed tokens are accepted, and the bonus token after them."""

import numpy as np
from numpy.typing import NDArray

from ssd.types import Outcome

Ints = NDArray[np.int64]


def verify_coupled(proposal_BK: Ints, num_proposed_B: Ints, chosen_BP: Ints) -> list[Outcome]:
    """Accept proposed tokens up to the first token that differs from the target's choice.

    With coupled sampling, ``chosen_BP`` is exact at every row. No acceptance ratio or residual is
    needed. The choice after the accepted prefix is the bonus token.

    Args:
        proposal_BK: token ids. Tokens from index ``num_proposed`` on are padding.
        num_proposed_B: 0..K. 0 means plain decoding.
        chosen_BP: the target's choice at rows 0..K.

    Returns:
        The outcome of each sequence, with 0..num_proposed accepted tokens.

    Source: arXiv 2408.07978 (shared noise).
    """
    index_K = np.arange(proposal_BK.shape[1])
    agrees_BK = (proposal_BK == chosen_BP[:, :-1]) & (index_K < num_proposed_B[:, None])
    accepted_B = np.logical_and.accumulate(agrees_BK, axis=1).sum(axis=1)
    bonus_B = chosen_BP[np.arange(len(chosen_BP)), accepted_B]
    return [
        Outcome(k, token) for k, token in zip(accepted_B.tolist(), bonus_B.tolist(), strict=True)
    ]
