"""The target's own choice at each row of a round."""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.config import EngineConfig
from ssd.engine.sampling.choose import choose
from ssd.speculation.noise import NoiseRing
from ssd.types import NO_TOKEN
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
        self._temperature_S = torch.zeros(engine.max_num_seqs)

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
        count = len(sequences)
        slots_B = np.fromiter((each.slot for each in sequences), np.int64, count)
        next_B = np.fromiter((len(each.tokens) for each in sequences), np.int64, count)
        self._ring.fill_each(slots_B, next_B, num_proposed_B + 1)

    def choose(
        self, sequences: Rows[Sequence], num_proposed_B: torch.Tensor, logits_BPV: torch.Tensor
    ) -> torch.Tensor:
        """Select the target's token at each row.

        Args:
            sequences: those of the round.
            num_proposed_B: int64, 0..K. Rows 0..num_proposed of each sequence count.
            logits_BPV: float32.

        Returns:
            ``chosen_BP`` int64, ``NO_TOKEN`` at padding and where the logits are not finite.
        """
        self.fill(sequences, num_proposed_B.numpy())
        row_P = torch.arange(logits_BPV.shape[1])
        counts_BP = row_P <= num_proposed_B[:, None]
        sequence_R, row_R = counts_BP.nonzero(as_tuple=True)
        slots_B = torch.tensor([each.slot for each in sequences], dtype=torch.int64)
        next_B = torch.tensor([len(each.tokens) for each in sequences], dtype=torch.int64)
        chosen_BP = torch.full(counts_BP.shape, NO_TOKEN, dtype=torch.int64)
        chosen_BP[sequence_R, row_R] = self._choose(
            slots_B[sequence_R], next_B[sequence_R] + row_R, logits_BPV[sequence_R, row_R]
        )
        return chosen_BP

    def choose_at(self, slots_B: Ints, positions_B: Ints, logits_BV: torch.Tensor) -> Ints:
        """Select one token of each slot, with the noise of a position that is filled.

        The logits may have fewer columns than those of the target: padding of its vocabulary.
        """
        chosen_B = self._choose(torch.from_numpy(slots_B), torch.from_numpy(positions_B), logits_BV)
        return chosen_B.numpy()

    def _choose(
        self, slots_R: torch.Tensor, positions_R: torch.Tensor, logits_RV: torch.Tensor
    ) -> torch.Tensor:
        noise_RV = self._ring.rows(slots_R, positions_R)
        if noise_RV is not None:
            noise_RV = noise_RV[:, : logits_RV.shape[1]]
        return choose(logits_RV, self._temperature_S[slots_R], noise_RV).cpu()
