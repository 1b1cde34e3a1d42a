"""Choosing tokens: the largest tempered score plus the noise of the caller."""

from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd.types import NO_TOKEN, TokenId


def choose(logits_RV: Tensor, temperature_R: Tensor, noise_RV: Tensor | None) -> Tensor:
    """Return the token of each row.

    Args:
        logits_RV: fp32; -inf where a token may not be chosen.
        temperature_R: fp32, >= 0; 0 takes the largest logit and no noise.
        noise_RV: fp32 Gumbel noise; None when every temperature is 0.

    Returns:
        int64 [R]: argmax(logits / T + noise); ties go to the lowest id. ``NO_TOKEN`` for a row that
        contains NaN or +inf, or only -inf.

    Source: speculation.md 4; the Gumbel-max trick.
    """
    best_R = _argmax(_scores(logits_RV, temperature_R, noise_RV))
    # An argmax selects NaN first and +inf next, so it is enough to test the selected value.
    is_token_R = logits_RV.gather(1, best_R[:, None]).squeeze(1).isfinite()
    return best_R.where(is_token_R, NO_TOKEN)


def choose_row(
    logits_V: NDArray[np.float32],
    temperature: float,
    noise_V: NDArray[np.float32] | None,
    scores_V: NDArray[np.float32],
) -> TokenId:
    """Return ``choose`` of one row on the CPU.

    Few calls of numpy: after a forward pass, each takes 10 to 50 us. A row fits into the second
    cache of a core, which a matrix of many rows does not.

    Args:
        logits_V: fp32.
        temperature: > 0 if there is noise; not read otherwise.
        noise_V: fp32, which may have more values than the logits, for padding of a vocabulary;
            None at temperature 0.
        scores_V: fp32, overwritten; at least as many values as the logits.
    """
    if noise_V is None:
        token = int(logits_V.argmax())
    else:
        scores_V = np.divide(logits_V, np.float32(temperature), out=scores_V[: len(logits_V)])
        scores_V += noise_V[: len(logits_V)]
        token = int(scores_V.argmax())
    # As in ``choose``, it is enough to test the selected value.
    return token if isfinite(logits_V[token]) else NO_TOKEN


def _scores(logits_RV: Tensor, temperature_R: Tensor, noise_RV: Tensor | None) -> Tensor:
    """Return logits + T * noise: in the order of logits / T + noise, continuous down to T = 0."""
    if noise_RV is None:
        return logits_RV
    return torch.addcmul(logits_RV, temperature_R[:, None], noise_RV)


def _argmax(scores_RV: Tensor) -> Tensor:
    """Return the first largest column of each row, int64 [R]."""
    if scores_RV.device.type != "cpu":
        return scores_RV.argmax(dim=-1)
    # numpy is vectorised: 5 us instead of 62 us of torch for 24 rows of 4,096.
    return torch.from_numpy(scores_RV.numpy().argmax(axis=-1))


def top_candidates(
    logits_RV: Tensor, temperature_R: Tensor, noise_RV: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best tokens of each row and their scores, best first.

    The score is u = log q + T g, in logit units and up to a constant of its row: continuous down to
    T = 0, and in the order of the choice, so candidate 0 is the token that ``choose`` returns.

    Returns:
        ids int64 [R, count] and scores fp32 [R, count]. The first score of a row is finite if its
        candidates are valid.
    """
    best = _scores(logits_RV, temperature_R, noise_RV).topk(count, dim=-1)
    return best.indices, best.values
