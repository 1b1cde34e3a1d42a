"""What a request changes in the logits of its rows, before a token is chosen from them.

Each function returns the same bits of a row whatever rows are beside it, so tokens do not depend on
speculation. Single values are exact in any shape. Sums are sums of integers, which have no order.

*Decision*: a filter is a lowest logit. *Because*: only values are sorted, never ids, and tokens as
likely as the last one are kept, so no order of equal logits matters. *Not chosen*: the order of
ids, which ``transformers`` uses for top-p; it removes some of several equally likely tokens.

Letters: C columns (rows of one sequence), R rows, V token ids of the model.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd.engine.sampling.keyed import to_device

_UNIT_WEIGHT = 2.0**32
"""Weight of the most likely token."""
_SUM_UNIT = 2.0**40
"""Weight of the most likely token in a sum that is a result: 2^17 tokens change it by 2^-23."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Which tokens remain at each row; on the device of the logits."""

    temperatures_R: Tensor
    """float32, above 0: filters do not change a choice at temperature 0."""
    top_k_R: Tensor
    """int64, 0 keeps all tokens."""
    top_p_R: Tensor
    """float64; 1 keeps all tokens."""
    min_p_R: Tensor
    """float32, 0 keeps all tokens."""

    @classmethod
    def on(
        cls,
        device: str,
        temperatures_R: NDArray[np.float32],
        top_k_R: NDArray[np.int64],
        top_p_R: NDArray[np.float64],
        min_p_R: NDArray[np.float32],
    ) -> "Filters":
        """Copy the filters of rows to a device."""
        arrays = (temperatures_R, top_k_R, top_p_R, min_p_R)
        return cls(*(to_device(torch.from_numpy(array), device) for array in arrays))

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All fields."""
        return (self.temperatures_R, self.top_k_R, self.top_p_R, self.min_p_R)


def penalized(
    logits_X: Tensor,
    counts_X: Tensor,
    is_prompt_X: Tensor,
    *,
    repetition: float | Tensor,
    presence: float | Tensor,
    frequency: float | Tensor,
) -> Tensor:
    """Return logits that are lower for tokens that are already present.

    All tensors have one shape X, or one that is broadcast to it.

    Args:
        logits_X: fp32.
        counts_X: fp32, occurrences of each token among the new tokens before the row.
        is_prompt_X: bool, tokens of the prompt.
        repetition: divides positive logits and multiplies negative ones, of all present tokens.
        presence: subtracted once from the logits of new tokens.
        frequency: subtracted for each occurrence of new tokens.

    Source: arXiv 1909.05858 (repetition); the API of OpenAI (presence, frequency).
    """
    is_new_X = counts_X > 0
    lower_X = torch.where(logits_X > 0, logits_X / repetition, logits_X * repetition)
    logits_X = torch.where(is_new_X | is_prompt_X, lower_X, logits_X)
    return logits_X - counts_X * frequency - is_new_X * presence


def filtered(logits_RV: Tensor, filters: Filters) -> Tensor:
    """Return the logits with -inf at the tokens that top-k, top-p or min-p remove, in this order.

    top-p counts probabilities among the tokens that top-k keeps. Rows that are not finite stay so.
    The logits are fp32, and -inf where a token may not be chosen.
    """
    if logits_RV.device.type == "cpu":
        # One row at a time: exp can differ between the vectors and the rest of an array.
        lowest_R = [
            _lowest_of_row(row_V, temperature, top_k, top_p, min_p)
            for row_V, temperature, top_k, top_p, min_p in zip(
                logits_RV.numpy(), *(field_R.tolist() for field_R in filters.fields), strict=True
            )
        ]
        lowest_R1 = torch.tensor(lowest_R, dtype=torch.float32)[:, None]
        return logits_RV.masked_fill(logits_RV < lowest_R1, -torch.inf)
    temperatures_R1 = filters.temperatures_R[:, None]
    sorted_RV = logits_RV.sort(dim=1, descending=True).values
    best_R1 = sorted_RV[:, :1]
    weights_RV = (((sorted_RV - best_R1) / temperatures_R1).exp() * _UNIT_WEIGHT).long()
    mass_RV = weights_RV.cumsum(dim=1)
    num_ids = logits_RV.shape[1]
    last_R1 = torch.where(filters.top_k_R > 0, filters.top_k_R, num_ids).clamp(max=num_ids)[:, None]
    in_top_k_RV = sorted_RV >= sorted_RV.gather(1, last_R1 - 1)
    num_kept_R1 = in_top_k_RV.sum(dim=1, keepdim=True).clamp(min=1)
    top_p_R1 = filters.top_p_R[:, None]
    needed_R1 = mass_RV.gather(1, num_kept_R1 - 1) * top_p_R1
    num_likely_R1 = (mass_RV < needed_R1).sum(dim=1, keepdim=True) + 1
    num_likely_R1 = torch.where(top_p_R1 < 1, num_likely_R1, num_ids)
    lowest_R1 = sorted_RV.gather(1, torch.minimum(num_kept_R1, num_likely_R1) - 1)
    lowest_R1 = torch.maximum(lowest_R1, best_R1 + temperatures_R1 * filters.min_p_R[:, None].log())
    return logits_RV.masked_fill(logits_RV < lowest_R1, -torch.inf)


def best_logprobs(logits_RV: Tensor, chosen_R: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the chosen tokens and of the most likely ones.

    Args:
        logits_RV: fp32, as the model computed them.
        chosen_R: int64; of a negative one, a row without a token, the result is any number.
        count: most likely tokens, at least 0.

    Returns:
        ids int64 and log-probabilities fp32, [R, 1 + count]: the chosen one, then the best ones.
    """
    count = min(count, logits_RV.shape[1])
    best = logits_RV.topk(count, dim=1)
    ids_RN = torch.cat((chosen_R[:, None], best.indices), dim=1)
    on_cpu = logits_RV.device.type == "cpu"
    sums_R1 = log_sums_by_row(logits_RV) if on_cpu else log_sums_of_integers(logits_RV)
    return ids_RN, logits_RV.gather(1, ids_RN.clamp(min=0)) - sums_R1


def log_sums_by_row(logits_RV: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, [R, 1], as fast as a CPU can.

    One row at a time, so that a sum has the same order for any number of rows.
    """
    return torch.stack([row_V.logsumexp(dim=0, keepdim=True) for row_V in logits_RV])


def log_sums_of_integers(logits_RV: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, [R, 1], by a few operations for all rows."""
    best_R1 = logits_RV.amax(dim=1, keepdim=True)
    weights_RV = ((logits_RV - best_R1).exp() * _SUM_UNIT).long()
    return best_R1 + (weights_RV.sum(dim=1, keepdim=True).double() / _SUM_UNIT).log().float()


def _lowest_of_row(
    logits_V: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> np.float32:
    """Return the lowest logit that the filters keep; NaN, which keeps all, if none is finite."""
    best = logits_V.max()
    if not np.isfinite(best):
        return np.float32(np.nan)
    scale = np.float32(temperature)
    with np.errstate(divide="ignore"):
        lowest = best + scale * np.log(np.float32(min_p))
    if 0 < top_k < len(logits_V):
        last = np.partition(logits_V, -top_k)[-top_k]
        lowest = max(lowest, last)
        logits_V = logits_V[logits_V >= last]
    if top_p < 1.0:
        sorted_N = np.sort(logits_V)[::-1]
        # Sums of integers below 2^53 are exact, so they have no order.
        mass_N = _weights(sorted_N, best, scale).cumsum(dtype=np.float64)
        lowest = max(lowest, sorted_N[np.searchsorted(mass_N, mass_N[-1] * top_p)])
    return np.float32(lowest)


def _weights(
    logits_N: NDArray[np.float32], best: np.float32, scale: np.float32
) -> NDArray[np.float32]:
    """Return integers in proportion to the probabilities of tokens, as fp32."""
    weights_N = logits_N - best
    weights_N /= scale
    np.exp(weights_N, out=weights_N)
    weights_N *= np.float32(_UNIT_WEIGHT)
    np.floor(weights_N, out=weights_N)
    return weights_N
