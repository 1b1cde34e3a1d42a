"""Choices by argmax(processed logits + Gumbel noise of (seed, position)), for rows of vLLM. Pure.

vLLM's logits are processed before: penalties, bias, grammars, min-p, temperature, top-k and top-p.
The noise is that of ``ssd.speculation.noise``, so a draft with the same seed foresees the choice,
and a text does not depend on what was proposed: see speculation.md, section 4.

Letters: B requests, R rows of proposed tokens of all requests, L most proposed tokens of one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd.engine.sampling.host_noise import gumbel_by_torch
from ssd.engine.sampling.keyed import NoiseKeys, compiled_on, gumbel_of_keys, packed, to_device
from ssd.speculation.noise import GumbelRows

Int64s = NDArray[np.int64]
BLOCK_VALUES = 1 << 22
"""Values of noise that are computed together; about 25 bytes each on a device."""
NOT_CHOSEN = -1
"""What vLLM expects after the last token of a row."""


@dataclass(frozen=True, slots=True)
class HostKeys:
    """The addresses of the noise of some rows."""

    seeds_R: NDArray[np.uint64]
    positions_R: Int64s
    temperatures_R: NDArray[np.float32]

    def of(self, rows: slice | Int64s) -> "HostKeys":
        """Return the addresses of some of the rows."""
        return HostKeys(self.seeds_R[rows], self.positions_R[rows], self.temperatures_R[rows])


@dataclass(frozen=True, slots=True)
class StepAddresses:
    """The addresses of the noise of a step."""

    seeds_B: NDArray[np.uint64]
    temperatures_B: NDArray[np.float32]
    next_B: Int64s
    """Index of the next token of each text."""
    num_proposed_B: Int64s

    def requests_of_rows(self) -> Int64s:
        """Return the request of each proposed token, [R]."""
        return np.repeat(np.arange(len(self.next_B)), self.num_proposed_B)

    def columns_of_rows(self) -> Int64s:
        """Return the place of each proposed token in its proposal, [R]."""
        first_B = np.cumsum(self.num_proposed_B) - self.num_proposed_B
        return np.arange(int(self.num_proposed_B.sum())) - np.repeat(first_B, self.num_proposed_B)

    def keys_of_rows(self, requests_R: Int64s, columns_R: Int64s) -> HostKeys:
        """Return the addresses of rows: requests, and places in their proposals."""
        positions_R = self.next_B[requests_R] + columns_R
        return HostKeys(self.seeds_B[requests_R], positions_R, self.temperatures_B[requests_R])

    def keys_after_proposals(self) -> HostKeys:
        """Return the addresses of the rows after all proposed tokens, one of each request."""
        return HostKeys(self.seeds_B, self.next_B + self.num_proposed_B, self.temperatures_B)


class CoupledNoise:
    """Chooses the tokens of rows. The worker's thread."""

    def __init__(self) -> None:
        self._rows: GumbelRows | None = None
        self._gumbel: Callable[..., Tensor] | None = None
        """Compiled for the device."""

    def choose(self, logits_RV: Tensor, keys: HostKeys) -> Tensor:
        """Return argmax(logits + noise) of each row, int64 [R]; temperature 0 adds no noise.

        Rows are computed in blocks: vLLM has not reserved memory for the noise of all rows.
        """
        if not (keys.temperatures_R > 0).any():
            return logits_RV.argmax(dim=-1)
        size = max(1, BLOCK_VALUES // logits_RV.shape[1])
        chosen = []
        for first in range(0, len(keys.seeds_R), size):
            block = slice(first, first + size)
            noise_RV = self._noise(keys.of(block), logits_RV.shape[1], logits_RV.device)
            chosen.append((logits_RV[block] + noise_RV).argmax(dim=-1))
        return torch.cat(chosen)

    def reserve(self, vocab_size: int, device: torch.device) -> None:
        """Compute the noise of a whole block on a device: vLLM measures its memory at the start."""
        if device.type != "cpu":
            shape = (max(2, BLOCK_VALUES // vocab_size),)
            of_nobody = HostKeys(
                np.zeros(shape, np.uint64), np.zeros(shape, np.int64), np.ones(shape, np.float32)
            )
            self._noise(of_nobody, vocab_size, device)

    def _noise(self, keys: HostKeys, vocab_size: int, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._on_host(keys, vocab_size)
        if self._gumbel is None:
            self._gumbel = compiled_on(str(device), gumbel_of_keys)
        num_rows = len(keys.positions_R)
        if num_rows == 1:
            # The compiler makes a version of its own for one row, which takes seconds.
            keys = keys.of(np.zeros(2, np.int64))
        return noise_on_device(keys, vocab_size, str(device), self._gumbel)[:num_rows]

    def _on_host(self, keys: HostKeys, vocab_size: int) -> Tensor:
        if self._rows is None:
            self._rows = GumbelRows(vocab_size, gumbel_by_torch)
        is_warm_R = keys.temperatures_R > 0
        noise_RV = np.zeros((len(is_warm_R), vocab_size), dtype=np.float32)
        addresses_R4 = np.zeros((int(is_warm_R.sum()), 4), dtype=np.uint64)
        addresses_R4[:, 0] = keys.seeds_R[is_warm_R]
        addresses_R4[:, 1] = keys.positions_R[is_warm_R]
        self._rows.compute(noise_RV, np.flatnonzero(is_warm_R), addresses_R4)
        return torch.from_numpy(noise_RV)


def noise_on_device(
    keys: HostKeys,
    vocab_size: int,
    device: str,
    gumbel: Callable[..., Tensor] = gumbel_of_keys,
) -> Tensor:
    """Return noise that is computed on a device, float32 [R, V]; 0 at temperature 0.

    ``gumbel`` is ``gumbel_of_keys``, or its compiled form.
    """
    choices_R = np.zeros_like(keys.positions_R)
    packed_4R = packed(keys.seeds_R, choices_R, keys.positions_R, keys.temperatures_R)
    on_device = NoiseKeys.unpacked(to_device(packed_4R, device))
    noise_RV = gumbel(on_device, 0, vocab_size)
    return torch.where(on_device.temperatures_R[:, None] > 0, noise_RV, 0.0)


def accept(
    noise: CoupledNoise,
    addresses: StepAddresses,
    proposed_R: Tensor,
    logits_RV: Tensor,
    bonus_B: Tensor,
    most_proposed: int,
) -> Tensor:
    """Return the tokens of a step: accepted ones, then the choice at the first one that differs.

    A proposed token is accepted if it is the choice of its row.

    Args:
        noise: noise of the worker.
        addresses: addresses of the step.
        proposed_R: proposed tokens of all requests, one after the other.
        logits_RV: processed logits of their rows.
        bonus_B: choice of each request if all its proposed tokens are accepted.
        most_proposed: L.

    Returns:
        int32 [B, L + 1], with ``NOT_CHOSEN`` after the last token.
    """
    requests_R, columns_R = addresses.requests_of_rows(), addresses.columns_of_rows()
    keys = addresses.keys_of_rows(requests_R, columns_R)
    chosen_R = noise.choose(logits_RV, keys).to(torch.int32)
    device = str(logits_RV.device)
    place_2R = to_device(torch.from_numpy(np.stack((requests_R, columns_R))), device)
    count_B = to_device(torch.from_numpy(addresses.num_proposed_B), device)
    num_requests = len(addresses.next_B)
    chosen_BL = bonus_B.new_full((num_requests, most_proposed + 1), NOT_CHOSEN, dtype=torch.int32)
    chosen_BL.scatter_(1, count_B[:, None], bonus_B.to(torch.int32).view(-1, 1))
    chosen_BL[place_2R[0], place_2R[1]] = chosen_R
    is_same_BL = torch.zeros((num_requests, most_proposed + 1), dtype=torch.bool, device=device)
    is_same_BL[place_2R[0], place_2R[1]] = chosen_R == proposed_R
    num_accepted_B1 = is_same_BL.to(torch.int32).cumprod(dim=1).sum(dim=1, keepdim=True)
    column_L = torch.arange(most_proposed + 1, device=device)
    return chosen_BL.where(column_L <= num_accepted_B1, NOT_CHOSEN)
