"""Choosing tokens: the largest tempered score, with the noise that the caller brings."""

import torch
from torch import Tensor


def choose(logits_RV: Tensor, temperature_R: Tensor, noise_RV: Tensor | None) -> Tensor:
    """Return the token of each row.

    Args:
        logits_RV: fp32; -inf where a token may not be chosen.
        temperature_R: fp32, >= 0; 0 takes the largest logit and no noise.
        noise_RV: fp32 Gumbel noise; None when every temperature is 0.

    Returns:
        int64 [R]: argmax(logits / T + noise); ties go to the lowest id.

    Source: speculation.md 4; the Gumbel-max trick.
    """
    if noise_RV is None:
        return logits_RV.argmax(dim=-1)
    is_warm_R1 = temperature_R[:, None] > 0
    tempered_RV = logits_RV / torch.where(is_warm_R1, temperature_R[:, None], 1.0)
    return torch.where(is_warm_R1, tempered_RV + noise_RV, logits_RV).argmax(dim=-1)


def top_candidates(
    logits_RV: Tensor, temperature_R: Tensor, noise_RV: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best tokens of each row and their scores, best first.

    The score is u = log q + T g, in logit units: continuous down to T = 0, and ordered like the
    choice itself, so that candidate 0 is the token that ``choose`` takes.

    Returns:
        ids int64 [R, count] and scores fp32 [R, count].
    """
    noisy_RV = logits_RV
    if noise_RV is not None:
        noisy_RV = torch.addcmul(logits_RV, temperature_R[:, None], noise_RV)
    best = noisy_RV.topk(count, dim=-1)
    # The mass is the same for all of a row: taken off last, it costs no tensor of R x V.
    return best.indices, best.values - torch.logsumexp(logits_RV, dim=-1, keepdim=True)
