"""The target's own choice at each row of a round."""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.config import EngineConfig
from ssd.engine.sampling.choose import choose_rows
from ssd.speculation.noise import NoiseRing
from ssd.types import NO_TOKEN
from ssd_target.decoding.batch_builder import Proposals
from ssd_target.decoding.sequence import Sequence

Ints = NDArray[np.int64]


class Sampler:
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


def _addresses(sequences: Rows[Sequence]) -> tuple[Ints, Ints]:
    """Return slots and next positions."""
    count = len(sequences)
    slots_B = np.fromiter((each.slot for each in sequences), np.int64, count)
    next_B = np.fromiter((len(each.tokens) for each in sequences), np.int64, count)
    return slots_B, next_B
