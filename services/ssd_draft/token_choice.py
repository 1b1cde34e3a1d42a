"""How a draft chooses and ranks tokens: with stored noise on the CPU, or on the model's device.

Both give the same tokens as the target's sampler: the noise has the same words, and its values
agree to 2e-6. A difference costs a hit at most.

*Decision*: a draft lowers the scores of tokens that top-k or min-p of a request remove; see
``soft_filters``. It ignores top-p. *Because*: an exact filter costs more than it gains. Embedded
pair, two cores that other work shares, engine openvino, 16 prompts of 128 tokens, 8 at a time, K =
6, N = 24, temperature 1, top-p .9: 2.40 tokens per round without and 2.58 with filters, but 12 s
and 22 s, the same in two interleaved runs. A row of 4,096 logits takes .06 to .1 ms, for 192 rows
in each step. *Not chosen*: to rank forks with exact filters, which lowered the hit rate at top-p .9
from .88 to .84: the target keeps tokens that the draft's filters remove. *Revisit when* a cheap
approximation of top-p is known.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd.engine.batch import StoredNoise
from ssd.engine.sampling.choose import choose, top_candidates
from ssd.engine.sampling.host_noise import gumbel_by_torch
from ssd.engine.sampling.keyed import (
    NoiseKeys,
    choose_of_keys,
    compiled_on,
    packed,
    rank_of_keys,
    to_device,
)
from ssd.engine.sampling.soft_filters import SoftFilters
from ssd.speculation.noise import NoiseRing

Ints = NDArray[np.int64]


class TokenChoice(Protocol):
    """Chooses tokens with the noise of sessions, by slot. Step thread only.

    A position is the position of the selected token.
    """

    @property
    def filters(self) -> SoftFilters:
        """The filters of the slots; ``choose`` and ``rank`` apply them."""

    def assign(self, slot: int, seed: int, choice: int, temperature: float) -> None:
        """Assign a slot to a session, without its filters."""

    def release(self, slot: int) -> None:
        """Release the slot of a session, and its filters."""

    def fill(self, slots_B: Ints, first_B: Ints, count: int) -> None:
        """Prepare ``count`` positions of each slot, from ``first_B`` on."""

    def fill_ahead(self, committed_X: Ints, count: int) -> bool:
        """Prepare some of the next ``count`` positions of a slot; returns False if none is left.

        Called while waiting. ``committed_X`` is the number of committed tokens by slot.
        """

    def choose(self, logits_RV: Tensor, slots_R: Ints, positions_R: Ints) -> Tensor:
        """Return the token of each row, int64 [R], on their device; see ``engine.sampling``."""

    def stored_noise(self, slots_R: Ints, positions_KR: Ints) -> StoredNoise | None:
        """Return noise and filters of several columns; None if each choice computes its noise."""

    def rank(
        self, logits_RV: Tensor, slots_R: Ints, positions_R: Ints, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return the best tokens of each row and their scores; see ``top_candidates``."""


class RingChoice:
    """Noise is computed once for each position, while waiting if possible, and kept in a ring."""

    def __init__(self, num_slots: int, num_rows: int, vocab_size: int) -> None:
        """Construct; see ``NoiseRing``."""
        self.filters = SoftFilters(num_slots, "cpu")
        self._ring = NoiseRing(num_slots, num_rows, vocab_size, gumbel_by_torch)
        self._noise_YV = torch.from_numpy(self._ring.noise_YV)
        self._temperatures_X = torch.zeros(num_slots)

    def assign(self, slot: int, seed: int, choice: int, temperature: float) -> None:
        """See ``TokenChoice``."""
        self._temperatures_X[slot] = temperature
        self._ring.assign(slot, seed, choice, temperature)

    def release(self, slot: int) -> None:
        """See ``TokenChoice``."""
        self.filters.release(slot)
        self._temperatures_X[slot] = 0
        self._ring.release(slot)

    def fill(self, slots_B: Ints, first_B: Ints, count: int) -> None:
        """See ``TokenChoice``."""
        self._ring.fill_each(slots_B.tolist(), first_B.tolist(), [count] * len(slots_B))

    def fill_ahead(self, committed_X: Ints, count: int) -> bool:
        """See ``TokenChoice``."""
        # A slot without noise, and one before its first ``fill``, is not short.
        last_X = self._ring.last_Z
        is_short_X = (last_X > committed_X) & (last_X < committed_X + count)
        if not is_short_X.any():
            return False
        slot = int(is_short_X.argmax())
        self._ring.fill(slot, int(last_X[slot]) + 1, 1)
        return True

    def choose(self, logits_RV: Tensor, slots_R: Ints, positions_R: Ints) -> Tensor:
        """See ``TokenChoice``."""
        noise_RV = self._noise(slots_R, positions_R)
        logits_RV = self.filters.lowered(logits_RV, slots_R)
        return choose(logits_RV, self._temperatures_X[torch.from_numpy(slots_R)], noise_RV)

    def stored_noise(self, slots_R: Ints, positions_KR: Ints) -> StoredNoise:
        """See ``TokenChoice``."""
        rows_KR = self._ring.locate(np.broadcast_to(slots_R, positions_KR.shape), positions_KR)
        temperature_R = self._temperatures_X[torch.from_numpy(slots_R)]
        filters = self.filters.of_rows(slots_R, self._noise_YV.shape[1])
        return StoredNoise(temperature_R, self._noise_YV, rows_KR, filters)

    def rank(
        self, logits_RV: Tensor, slots_R: Ints, positions_R: Ints, count: int
    ) -> tuple[Tensor, Tensor]:
        """See ``TokenChoice``."""
        noise_RV = self._noise(slots_R, positions_R)
        logits_RV = self.filters.lowered(logits_RV, slots_R)
        temperature_R = self._temperatures_X[torch.from_numpy(slots_R)]
        return top_candidates(logits_RV, temperature_R, noise_RV, count)

    def _noise(self, slots_R: Ints, positions_R: Ints) -> Tensor | None:
        noise_RV = self._ring.rows(slots_R, positions_R)
        return None if noise_RV is None else torch.from_numpy(noise_RV)


class KeyedChoice:
    """Noise is computed with each choice, on the device of the logits. Nothing is read back."""

    def __init__(self, num_slots: int, device: str) -> None:
        self.filters = SoftFilters(num_slots, device)
        self._device = device
        self._choose_of_keys = compiled_on(device, choose_of_keys)
        self._rank_of_keys = compiled_on(device, rank_of_keys)
        self._seeds_X = np.zeros(num_slots, dtype=np.uint64)
        self._choices_X = np.zeros(num_slots, dtype=np.int64)
        self._temperatures_X = np.zeros(num_slots, dtype=np.float32)

    @torch.inference_mode()
    def warm_up(self, num_rows: int, num_candidates: int, vocab_size: int) -> None:
        """Choose and rank rows with and without noise and filters: no table waits for a compiler.

        The compiler makes different functions for one row and several rows, for inference mode, and
        for numbers of columns of which only some are multiples of 4.

        Args:
            num_rows: of a usual choice; several sessions have several rows even if this is 1.
            num_candidates: tokens that are kept of each row.
            vocab_size: columns of all logits, with the padding of the vocabulary.
        """
        for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 1)):
            self._temperatures_X[0] = temperature
            self.filters.assign(0, temperature, top_k, 0.0)
            for count in (1, max(2, num_rows)):
                logits_RV = torch.zeros((count, vocab_size), device=self._device)
                zero_R = np.zeros(count, dtype=np.int64)
                self.choose(logits_RV, zero_R, zero_R)
                self.rank(logits_RV, zero_R, zero_R, num_candidates)
        self.release(0)

    def assign(self, slot: int, seed: int, choice: int, temperature: float) -> None:
        """See ``TokenChoice``."""
        self._seeds_X[slot] = seed
        self._choices_X[slot] = choice
        self._temperatures_X[slot] = temperature

    def release(self, slot: int) -> None:
        """See ``TokenChoice``."""
        self.filters.release(slot)
        self._temperatures_X[slot] = 0.0

    def fill(self, slots_B: Ints, first_B: Ints, count: int) -> None:
        """Do nothing: the noise of a choice is computed with it."""

    def fill_ahead(self, committed_X: Ints, count: int) -> bool:  # noqa: ARG002 - see fill
        """Return False: there is nothing to prepare."""
        return False

    def choose(self, logits_RV: Tensor, slots_R: Ints, positions_R: Ints) -> Tensor:
        """See ``TokenChoice``."""
        keys, is_warm = self._keys(slots_R, positions_R)
        logits_RV = self.filters.lowered(logits_RV, slots_R)
        return self._choose_of_keys(logits_RV, keys, is_warm=is_warm)

    def stored_noise(self, slots_R: Ints, positions_KR: Ints) -> None:
        """Return None: the noise of a choice is computed with it."""

    def rank(
        self, logits_RV: Tensor, slots_R: Ints, positions_R: Ints, count: int
    ) -> tuple[Tensor, Tensor]:
        """See ``TokenChoice``."""
        keys, is_warm = self._keys(slots_R, positions_R)
        logits_RV = self.filters.lowered(logits_RV, slots_R)
        return self._rank_of_keys(logits_RV, keys, count, is_warm=is_warm)

    def _keys(self, slots_R: Ints, positions_R: Ints) -> tuple[NoiseKeys, bool]:
        temperatures_R = self._temperatures_X[slots_R]
        keys_4R = packed(
            self._seeds_X[slots_R], self._choices_X[slots_R], positions_R, temperatures_R
        )
        return NoiseKeys.unpacked(to_device(keys_4R, self._device)), bool(
            (temperatures_R > 0).any()
        )
