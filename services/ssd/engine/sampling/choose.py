"""Choosing tokens: the largest tempered score plus the noise of the caller."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd.types import NO_TOKEN

_GROUP_VALUES = 1 << 17
"""Scores of a group: 512 KiB."""


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


def choose_rows(
    logits_XV: Tensor,
    rows_R: NDArray[np.int64],
    temperature_R: NDArray[np.float32],
    noise_YV: Tensor,
    noise_rows_R: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return ``choose`` of some rows of a matrix on the CPU, without copies of whole matrices.

    Rows are scored in groups that fit into the cache of a core: 112 rows of 128,256 tokens took 250
    ms as matrices.

    Args:
        logits_XV: fp32.
        rows_R: the rows to choose from.
        temperature_R: fp32, >= 0, of each chosen row.
        noise_YV: fp32; it may have more columns than the logits, for padding of a vocabulary.
        noise_rows_R: row of the noise of each chosen row; not read at temperature 0.
    """
    logits, noise = logits_XV.numpy(), noise_YV.numpy()
    num_ids = logits.shape[1]
    size = max(1, _GROUP_VALUES // num_ids)
    scores_GV = np.empty((min(size, len(rows_R)), num_ids), dtype=np.float32)
    chosen_R = np.empty(len(rows_R), dtype=np.int64)
    is_warm_R = temperature_R > 0
    for kind_R, is_warm in ((np.flatnonzero(~is_warm_R), False), (np.flatnonzero(is_warm_R), True)):
        for first in range(0, len(kind_R), size):
            group_G = kind_R[first : first + size]
            scores = scores_GV[: len(group_G)]
            np.take(logits, rows_R[group_G], axis=0, out=scores, mode="clip")
            if is_warm:
                scores /= temperature_R[group_G, None]
                scores += noise[noise_rows_R[group_G], :num_ids]
            chosen_R[group_G] = scores.argmax(axis=1)
    # As in ``choose``, it is enough to test the selected value.
    is_token_R = np.isfinite(logits[rows_R, chosen_R])
    return np.where(is_token_R, chosen_R, NO_TOKEN)


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
