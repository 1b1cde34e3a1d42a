"""Choosing tokens on the device of the logits, with noise that is computed there from its keys.

The noise is that of ``speculation.noise``: the same Philox words, and Gumbel values that agree to
2e-6. It is computed for the logits' own columns and never stored, so a rank that has a part of the
vocabulary computes the noise of its part. All shapes are static and nothing is read back.

*Decision*: expressions of torch, which ``torch.compile`` fuses on CUDA. *Because*: one expression
runs, and is tested, on every device. *Not chosen*: a kernel in Triton, a second version of the
noise. *Revisit when* the compiled expression is far from the time of one read of the logits.

Letters: R rows, V token ids of the logits (those of a rank), Q counters of a row: V / 4, rounded
up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd.engine.compiler import has_c_compiler
from ssd.engine.sampling.choose import top_candidates
from ssd.observability.log import get_logger
from ssd.types import NO_TOKEN

_log = get_logger("ssd.engine")
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_WORDS = 4
_LARGEST_V = 1 - 2**-24
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """The address of the noise of each row, and its temperature; on the device of the logits."""

    seeds_R: Tensor
    """int64, the bits of the unsigned seed."""
    choices_R: Tensor
    """int64, index of the continuation of a request."""
    positions_R: Tensor
    """int64, absolute index of the token to select."""
    temperatures_R: Tensor
    """float32, >= 0; 0 selects the largest logit."""

    @classmethod
    def unpacked(cls, packed_4R: Tensor) -> "NoiseKeys":
        """Return the keys that ``packed`` put into one tensor, which can be copied as a whole."""
        seeds_R, choices_R, positions_R, bits_R = packed_4R
        return cls(seeds_R, choices_R, positions_R, bits_R.int().view(torch.float32))


def packed(
    seeds_R: NDArray[np.uint64],
    choices_R: NDArray[np.int64],
    positions_R: NDArray[np.int64],
    temperatures_R: NDArray[np.float32],
) -> Tensor:
    """Return int64 [4, R] on the CPU: the fields of ``NoiseKeys``, temperatures by their bits."""
    rows = (seeds_R.view(np.int64), choices_R, positions_R, temperatures_R.view(np.int32))
    return torch.from_numpy(np.stack([row.astype(np.int64) for row in rows]))


def to_device(tensor: Tensor, device: str) -> Tensor:
    """Copy a tensor of the CPU to a device, without waiting for the copy."""
    if device == "cpu":
        return tensor
    pinned = tensor.pin_memory() if device.startswith("cuda") else tensor
    return pinned.to(device, non_blocking=True)


def words_of_keys(keys: NoiseKeys, first_id: int, num_ids: int) -> Tensor:
    """Return the Philox words of the tokens first_id..first_id+num_ids-1, int64 [R, num_ids].

    Args:
        keys: of the rows; temperatures are not read.
        first_id: a multiple of 4, since a counter gives the words of 4 tokens.
        num_ids: columns.
    """
    assert first_id % _WORDS == 0, first_id
    num_rows, num_counters = len(keys.positions_R), -(-num_ids // _WORDS)
    device = keys.positions_R.device
    first_counter = first_id // _WORDS
    counters_Q = torch.arange(first_counter, first_counter + num_counters, device=device)
    shape_RQ = (num_rows, num_counters)
    # The sum with zeros depends on data. Of an arange alone, the compiler computes the product
    # below as an index of 32 bits, and Triton refuses the multiplier for one row.
    a_RQ = counters_Q + (keys.positions_R & 0)[:, None]
    b_RQ = keys.positions_R[:, None].expand(shape_RQ)
    c_RQ = keys.choices_R[:, None].expand(shape_RQ)
    d_RQ = torch.zeros((), dtype=torch.int64, device=device).expand(shape_RQ)
    low_R1 = (keys.seeds_R & _MASK)[:, None]
    high_R1 = ((keys.seeds_R >> 32) & _MASK)[:, None]
    for index in range(_NUM_ROUNDS):
        # Products of 64 bits wrap around; the shift keeps the sign, which the mask removes.
        first_RQ, second_RQ = a_RQ * _MULTIPLIERS[0], c_RQ * _MULTIPLIERS[1]
        key_low_R1 = (low_R1 + _KEY_STEPS[0] * index) & _MASK
        key_high_R1 = (high_R1 + _KEY_STEPS[1] * index) & _MASK
        a_RQ, c_RQ = (
            ((second_RQ >> 32) & _MASK) ^ b_RQ ^ key_low_R1,
            ((first_RQ >> 32) & _MASK) ^ d_RQ ^ key_high_R1,
        )
        b_RQ, d_RQ = second_RQ & _MASK, first_RQ & _MASK
    words_RQ4 = torch.stack((a_RQ, b_RQ, c_RQ, d_RQ), dim=2)
    return words_RQ4.view(num_rows, -1)[:, :num_ids]


def gumbel_of_keys(keys: NoiseKeys, first_id: int, num_ids: int) -> Tensor:
    """Return the noise of the tokens of ``words_of_keys``, float32 [R, num_ids]."""
    words_RV = words_of_keys(keys, first_id, num_ids).float()
    negative_v_RV = ((words_RV + 0.5) * -(2.0**-32)).clamp(min=-_LARGEST_V)
    return -(-negative_v_RV.log1p()).log()


def best_of_keys(
    logits_RV: Tensor, keys: NoiseKeys, *, is_warm: bool, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the best score of each row and its token.

    Args:
        logits_RV: fp32, of the tokens from ``first_id`` on; -inf where a token may not be chosen.
        keys: of the rows.
        is_warm: whether some temperature is not 0. Otherwise no noise is computed.
        first_id: of the logits.

    Returns:
        fp32 [R], and int64 [R]: argmax(logits / T + noise), or the largest logit at temperature 0.
        Ties go to the lowest id. The score is NaN, +inf or -inf if the row has no valid token.
    """
    scores_RV = logits_RV
    if is_warm:
        is_warm_R1 = keys.temperatures_R[:, None] > 0
        noise_RV = gumbel_of_keys(keys, first_id, logits_RV.shape[1])
        divisor_R1 = torch.where(is_warm_R1, keys.temperatures_R[:, None], 1.0)
        scores_RV = logits_RV / divisor_R1 + torch.where(is_warm_R1, noise_RV, 0.0)
    scores_R, ids_R = scores_RV.max(dim=1)
    return scores_R, ids_R + first_id


def rank_of_keys(
    logits_RV: Tensor, keys: NoiseKeys, count: int, *, is_warm: bool
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best tokens of each row and their scores, best first.

    The logits are fp32, of all token ids. Unless ``is_warm``, all temperatures are 0, and no noise
    is computed.

    Returns:
        ids int64 [R, count] and scores log q + T g, fp32 [R, count]; see ``top_candidates``.
    """
    noise_RV = gumbel_of_keys(keys, 0, logits_RV.shape[1]) if is_warm else None
    return top_candidates(logits_RV, keys.temperatures_R, noise_RV, count)


def compiled_on(device: str, function: Function) -> Function:
    """Return a function of this module, compiled into a few kernels on CUDA."""
    if not device.startswith("cuda"):
        return function
    if not has_c_compiler():
        _log.warning("choice_not_compiled", reason="there is no C compiler", consequence="slower")
        return function
    # Not fullgraph: past the limit of compilations, the choice becomes slow instead of an error.
    return cast("Function", torch.compile(function, dynamic=True))


def choose_of_keys(logits_RV: Tensor, keys: NoiseKeys, *, is_warm: bool) -> Tensor:
    """Return the token of each row, int64 [R]; ``NO_TOKEN`` where no score is finite.

    The same choice as ``choose`` with the noise of the keys.
    """
    scores_R, ids_R = best_of_keys(logits_RV, keys, is_warm=is_warm)
    return torch.where(scores_R.isfinite(), ids_R, NO_TOKEN)
