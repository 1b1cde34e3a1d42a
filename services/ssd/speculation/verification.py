"""Verification: how many proposed tokens are accepted, and the bonus token after them."""

from collections.abc import Sequence

from ssd.types import Outcome, TokenId


def verify_coupled(proposal: Sequence[TokenId], chosen: Sequence[TokenId]) -> Outcome:
    """Accept proposed tokens up to the first token that differs from the target's choice.

    With coupled sampling, ``chosen`` is exact at every row. No acceptance ratio or residual is
    needed. The choice after the accepted prefix is the bonus token.

    Args:
        proposal: 0..K tokens. No token means plain decoding.
        chosen: the target's choice at the rows 0..len(proposal), at least up to the first one that
            differs.

    Source: arXiv 2408.07978 (shared noise).
    """
    accepted = 0
    for proposed, token in zip(proposal, chosen, strict=False):
        if proposed != token:
            break
        accepted += 1
    return Outcome(accepted, chosen[accepted])
