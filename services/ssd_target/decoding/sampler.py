"""The target's own choice at each row of a round, on the CPU or on the device of the model.

On the CPU, noise costs as much as a forward pass of a small model: it is computed once for each
position, while the drafts work. A device computes it in the registers that hold the logits.

*Decision*: verification, the look-up in tables and the inputs of the next round stay on the host,
with every device. *Because*: a round has one synchronisation, the read of B x P tokens, which the
streams and commits need on the host in any case. Tables are token ids that arrive over the network
in host memory. With 16 sequences, K = 6 and N = 24, they are 16 x 25 rows of 52 bytes, 21 KB: their
copy to the device would be a second transfer of each round, and rows that arrive late would need a
third. The look-up compares N pairs of numbers for each sequence, and the next inputs are one copy
of a pinned buffer. *Not chosen*: all three on the device, which would remove the host from the path
of a hit only if the tables of the next round were there before the verify ends, and would need a
second look-up on the host for streams, statistics and backups. *Revisit when* frames arrive in
device memory (``channel: nccl``) and a profile on GPUs shows host work above .3 ms in a round.
"""

from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.config import EngineConfig
from ssd.engine.sampling.choose import choose_rows
from ssd.engine.sampling.keyed import NoiseKeys, chooser_on, packed, to_device
from ssd.speculation.noise import NoiseRing
from ssd.types import NO_TOKEN
from ssd_target.decoding.batch_builder import Proposals
from ssd_target.decoding.sequence import Sequence

Ints = NDArray[np.int64]


class ChooseOfVerify(Protocol):
    """Selects tokens from the logits of a verify, on one rank or on several."""

    def __call__(
        self, logits_RV: torch.Tensor, keys_4R: torch.Tensor, *, is_warm: bool
    ) -> torch.Tensor:
        """Return the token of each row, int64 [R].

        Args:
            logits_RV: of all rows of the newest verify.
            keys_4R: of the rows, ``keyed.packed``.
            is_warm: whether some temperature is not 0.
        """


class RingSampler:
    """Selects the target's token at each of the P rows of a sequence. Step thread only.

    Noise is kept by (slot, position) and computed once: in ``fill``, while the drafts work, or in
    ``choose`` for the first token of a sequence.
    """

    def __init__(self, engine: EngineConfig, vocab_size: int) -> None:
        # Rows of the round in progress, and of the next one.
        self._ring = NoiseRing(engine.max_num_seqs, 2 * engine.num_columns, vocab_size)
        self._temperature_S = np.zeros(engine.max_num_seqs, dtype=np.float32)

    def admit(self, sequence: Sequence) -> None:
        """Assign the noise of a sequence's seed to its slot."""
        sampling = sequence.arrival.request.sampling
        self._ring.assign(sequence.slot, sampling.seed, 0, sampling.temperature)
        self._temperature_S[sequence.slot] = sampling.temperature

    def release(self, sequence: Sequence) -> None:
        """Release the noise of a sequence."""
        self._ring.release(sequence.slot)

    def fill(self, sequences: Rows[Sequence], num_proposed_B: Ints) -> None:
        """Compute the noise of the positions that the next round selects, unless it is stored."""
        self._ring.fill_each(*_addresses(sequences), num_proposed_B + 1)

    def choose(
        self, sequences: Rows[Sequence], proposals: Proposals, logits_BPV: torch.Tensor
    ) -> Ints:
        """Select the target's token at each row, up to the first one that is not the proposed one.

        Verification reads no row after it. At a vocabulary of 128,256, a row costs .2 ms.

        Args:
            sequences: those of the round.
            proposals: of the round. Rows 0..num_proposed of each sequence count.
            logits_BPV: float32.

        Returns:
            ``chosen_BP``, ``NO_TOKEN`` at padding, at rows that are not read, and where the
            logits are not finite.
        """
        num_proposed_B, proposed_BK = proposals.num_proposed_B, proposals.tokens_BK
        self.fill(sequences, num_proposed_B)
        slots_B, next_B = _addresses(sequences)
        num_columns = logits_BPV.shape[1]
        logits_XV = logits_BPV.cpu().reshape(-1, logits_BPV.shape[2])
        chosen_BP = np.full((len(sequences), num_columns), NO_TOKEN, dtype=np.int64)
        active_A = np.arange(len(sequences))
        for column in range(num_columns):
            rows_A = active_A * num_columns + column
            chosen_A = self._choose(logits_XV, rows_A, slots_B[active_A], next_B[active_A] + column)
            chosen_BP[active_A, column] = chosen_A
            active_A = active_A[num_proposed_B[active_A] > column]
            if not len(active_A):
                break
            active_A = active_A[chosen_BP[active_A, column] == proposed_BK[active_A, column]]
        return chosen_BP

    def choose_at(self, slots_B: Ints, positions_B: Ints, logits_BV: torch.Tensor) -> Ints:
        """Select one token of each slot, with the noise of a position that is filled.

        The logits may have fewer columns than those of the target: padding of its vocabulary.
        """
        return self._choose(logits_BV.cpu(), np.arange(len(slots_B)), slots_B, positions_B)

    def _choose(
        self, logits_XV: torch.Tensor, rows_R: Ints, slots_R: Ints, positions_R: Ints
    ) -> Ints:
        return choose_rows(
            logits_XV,
            rows_R,
            self._temperature_S[slots_R],
            self._ring.noise_YV,
            self._ring.locate(slots_R, positions_R),
        )


class KeyedSampler:
    """Selects tokens where the logits are, with one read of the result. Step thread only.

    The tokens are those of ``RingSampler``: the noise has the same words, and values that agree to
    2e-6.
    """

    def __init__(self, engine: EngineConfig, choose: ChooseOfVerify | None = None) -> None:
        """Construct; None chooses on the device of the engine, which has all logits."""
        self._device = engine.device
        self._choose_of_keys = chooser_on(engine.device)
        self._choose_of_verify = choose or self._choose_here
        self._seeds_S = np.zeros(engine.max_num_seqs, dtype=np.uint64)
        self._temperature_S = np.zeros(engine.max_num_seqs, dtype=np.float32)

    @torch.inference_mode()
    def warm_up(self, num_rows: int, vocab_size: int) -> None:
        """Choose rows with and without noise, so that no request waits for a compiler.

        One row and several rows are two functions, as are inference mode and its absence.
        """
        for temperature in (0.0, 1.0):
            self._temperature_S[0] = temperature
            for count in (1, num_rows):
                logits_RV = torch.zeros((count, vocab_size), device=self._device)
                zero_R = np.zeros(count, dtype=np.int64)
                self.choose_at(zero_R, zero_R, logits_RV)
        self._temperature_S[0] = 0.0

    def admit(self, sequence: Sequence) -> None:
        """Assign the noise of a sequence's seed to its slot."""
        sampling = sequence.arrival.request.sampling
        self._seeds_S[sequence.slot] = sampling.seed
        self._temperature_S[sequence.slot] = sampling.temperature

    def release(self, sequence: Sequence) -> None:
        """Release the noise of a sequence."""
        self._temperature_S[sequence.slot] = 0.0

    def fill(self, sequences: Rows[Sequence], num_proposed_B: Ints) -> None:
        """Do nothing: the noise of a choice is computed with it."""

    def choose(
        self, sequences: Rows[Sequence], proposals: Proposals, logits_BPV: torch.Tensor
    ) -> Ints:
        """Select the target's token at each row; see ``RingSampler.choose``.

        Rows after the first token that is not the proposed one have a token too.
        """
        slots_B, next_B = _addresses(sequences)
        column_P = np.arange(logits_BPV.shape[1])
        slots_R = slots_B.repeat(len(column_P))
        positions_R = (next_B[:, None] + column_P).ravel()
        chosen_R = self._select(
            slots_R, positions_R, logits_BPV.flatten(0, 1), self._choose_of_verify
        )
        is_read_BP = column_P <= proposals.num_proposed_B[:, None]
        return np.where(is_read_BP, chosen_R.reshape(is_read_BP.shape), NO_TOKEN)

    def choose_at(self, slots_R: Ints, positions_R: Ints, logits_RV: torch.Tensor) -> Ints:
        """Select one token of each row, from all logits of a model on this device."""
        return self._select(slots_R, positions_R, logits_RV, self._choose_here)

    def _select(
        self, slots_R: Ints, positions_R: Ints, logits_RV: torch.Tensor, choose: ChooseOfVerify
    ) -> Ints:
        """Select one token of each row, with the noise of its slot and position."""
        temperature_R = self._temperature_S[slots_R]
        choices_R = np.zeros_like(slots_R)
        keys_4R = packed(self._seeds_S[slots_R], choices_R, positions_R, temperature_R)
        chosen_R = choose(logits_RV, keys_4R, is_warm=bool((temperature_R > 0).any()))
        tokens_R: Ints = chosen_R.cpu().numpy()
        return tokens_R

    def _choose_here(
        self, logits_RV: torch.Tensor, keys_4R: torch.Tensor, *, is_warm: bool
    ) -> torch.Tensor:
        keys = NoiseKeys.unpacked(to_device(keys_4R, self._device))
        return self._choose_of_keys(logits_RV, keys, is_warm=is_warm)


def _addresses(sequences: Rows[Sequence]) -> tuple[Ints, Ints]:
    """Return slots and next positions."""
    count = len(sequences)
    slots_B = np.fromiter((each.slot for each in sequences), np.int64, count)
    next_B = np.fromiter((len(each.tokens) for each in sequences), np.int64, count)
    return slots_B, next_B
