"""Top-k and min-p of a request, as a draft follows them: scores of removed tokens are lowered.

A target with a filter never chooses what the filter removes. Its logits differ from those of the
draft, so it keeps tokens that a filter of the draft's logits would remove. Hence a logit below the
lowest one f that a filter keeps is lowered by ``FACTOR`` (f - logit), for choices and ranks alike.
The result is a guess; tokens of a text never depend on it.

*Decision*: f of top-k is one of the sorted maxima of groups of token ids. *Because*: a row of 4,096
takes 3 to 13 us in torch, exact top-k 35 to 116 (beside other work). Embedded pair, T = 1, K = 6, N
= 24, 600 rounds, tokens per round after a proposal and hit rate: top-k 20 1.97 / .82 without a
filter, 2.75 / .86 so, 2.69 / .71 with an exact filter that removes tokens; min-p .05 2.43 / .81,
3.15 / .88, 3.28 / .76. *Revisit when* requests with large k are frequent: beyond about 300 of 4,096
tokens, top-k has no effect here.

Letters: R rows, V token ids of the logits, X slots, G groups.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd.engine.batch import RowFilters
from ssd.engine.sampling.keyed import compiled_on, to_device

FACTOR = 2.0
"""Best for top-k 20; 1 to 3 are alike for min-p .05."""
_NUM_GROUPS = 64
_LEAST_GROUPED = 512
"""Vocabularies below have one group for each token, so that top-k is exact."""
LOWEST = -1e30
"""f without a filter: finite, so that -inf stays -inf, and below all finite logits of models."""


class SoftFilters:
    """The filters of sessions, by slot. Step thread only."""

    def __init__(self, num_slots: int, device: str) -> None:
        self._device = device
        self._lowered = compiled_on(device, lowered)
        self._top_k_X = np.zeros(num_slots, dtype=np.int64)
        self._min_logit_X = np.full(num_slots, -np.inf, dtype=np.float32)
        """T log(p) of min-p: the lowest kept logit less the largest one."""
        self._is_on_X = np.zeros(num_slots, dtype=np.bool_)

    def assign(self, slot: int, temperature: float, top_k: int, min_p: float) -> None:
        """Set the filters of a slot. At temperature 0 the target has none.

        Args:
            slot: of the session.
            temperature: >= 0.
            top_k: >= 0; 0 keeps all tokens.
            min_p: 0..1; 0 keeps all tokens.
        """
        self.release(slot)
        if temperature == 0.0 or not (top_k or min_p):
            return
        self._is_on_X[slot] = True
        self._top_k_X[slot] = top_k
        if min_p:
            self._min_logit_X[slot] = temperature * np.log(min_p)

    def release(self, slot: int) -> None:
        """Remove the filters of a slot."""
        self._is_on_X[slot] = False
        self._top_k_X[slot] = 0
        self._min_logit_X[slot] = -np.inf

    def of_rows(self, slots_R: NDArray[np.int64], num_ids: int) -> RowFilters | None:
        """Return the filters of rows of these slots; None if no row has one."""
        if not self._is_on_X[slots_R].any():
            return None
        return RowFilters(ranks_of(self._top_k_X[slots_R], num_ids), self._min_logit_X[slots_R])

    def lowered(self, logits_RV: Tensor, slots_R: NDArray[np.int64]) -> Tensor:
        """Return the logits with lower values where a filter removes a token; see ``lowered``.

        The result is the logits themselves if no row has a filter. They are never changed in place:
        the same logits are ranked later.
        """
        filters = self.of_rows(slots_R, logits_RV.shape[1])
        if filters is None:
            return logits_RV
        # One copy moves both arrays.
        bits_R = filters.min_logit_R.view(np.int32).astype(np.int64)
        packed_2R = to_device(torch.from_numpy(np.stack((filters.ranks_R, bits_R))), self._device)
        return self._lowered(logits_RV, packed_2R[0], packed_2R[1].int().view(torch.float32))


def ranks_of(top_k_R: NDArray[np.int64], num_ids: int) -> NDArray[np.int64]:
    """Return the rank, from 1, of the group maximum that stands for the k-th largest logit.

    It is the expected number of groups with one of the k best tokens, or 0 for no filter: top-k
    keeps all tokens, or a token of almost every group.
    """
    num_groups = num_groups_of(num_ids)
    is_empty_R = (1.0 - np.minimum(top_k_R / num_ids, 1.0)) ** (num_ids / num_groups)
    ranks_R = np.rint(num_groups * (1.0 - is_empty_R)).astype(np.int64)
    # One token of a group cannot stand for several groups.
    ranks_R = np.maximum(ranks_R, top_k_R > 0)
    return np.where(ranks_R < num_groups, ranks_R, 0)


def lowered(logits_RV: Tensor, ranks_R: Tensor, min_logit_R: Tensor) -> Tensor:
    """Return logits that are lower below f, the lowest logit that the filters keep.

    A row without a filter has the same bits as before. NaN and +inf make a row invalid, as before.

    Args:
        logits_RV: fp32; -inf where a token may not be chosen.
        ranks_R: int64, see ``ranks_of``.
        min_logit_R: fp32, f of min-p less the largest logit; -inf without min-p.
    """
    num_ids = logits_RV.shape[1]
    num_groups = num_groups_of(num_ids)
    # Neighbours are of different groups: the inner loop is over contiguous memory. The last ids of
    # a vocabulary that is no multiple of G are in no group.
    grouped_RV = logits_RV[:, : num_ids - num_ids % num_groups]
    maxima_RG = (
        grouped_RV.unflatten(1, (-1, num_groups)).amax(dim=1).sort(dim=1, descending=True)[0]
    )
    of_top_k_R1 = maxima_RG.gather(1, (ranks_R - 1).clamp_min(0)[:, None])
    of_top_k_R1 = of_top_k_R1.where(ranks_R[:, None] > 0, LOWEST)
    of_min_p_R1 = maxima_RG[:, :1] + min_logit_R[:, None]
    lowest_R1 = torch.maximum(of_top_k_R1, of_min_p_R1).clamp_min(LOWEST)
    # Below f, f + (1 + FACTOR) (logit - f) is the smaller one.
    return torch.minimum(logits_RV, torch.lerp(lowest_R1, logits_RV, 1.0 + FACTOR))


def num_groups_of(num_ids: int) -> int:
    """Return G: a token is in the group of its id modulo G."""
    return _NUM_GROUPS if num_ids >= _LEAST_GROUPED else num_ids
