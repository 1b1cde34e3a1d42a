"""The target's own choice at each row of a round."""

from collections.abc import Sequence as Rows

import torch

from ssd.engine.config import EngineConfig
from ssd.engine.sampling.choose import choose
from ssd.speculation.noise import NoiseRing
from ssd.types import NO_TOKEN
from ssd_target.decoding.sequence import Sequence


class Sampler:
    """Selects the target's token at each row. Step thread only.

    Noise is kept by (slot, position) and computed once, in ``fill``, while the drafts work.
    """

    def __init__(self, engine: EngineConfig, vocab_size: int) -> None:
        self._num_columns = engine.num_columns
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

    def fill(self, rows: Rows[Sequence]) -> None:
        """Compute the noise of all positions that the next round selects, unless it is known."""
        for row in rows:
            first = len(row.tokens)
            self._ring.fill(row.slot, first, first + self._num_columns - 1)

    def choose(
        self, rows: Rows[Sequence], num_proposed_B: torch.Tensor, logits_BPV: torch.Tensor
    ) -> torch.Tensor:
        """Select the target's token at each row.

        Args:
            rows: the sequences of the round.
            num_proposed_B: int64, 0..K. Row 0..num_proposed of each sequence counts.
            logits_BPV: float32.

        Returns:
            ``chosen_BP`` int64, ``NO_TOKEN`` at padding and where the logits are not finite.
        """
        self.fill(rows)
        column_P = torch.arange(logits_BPV.shape[1])
        counts_BP = column_P <= num_proposed_B[:, None]
        row_R, column_R = counts_BP.nonzero(as_tuple=True)
        slots_B = torch.tensor([row.slot for row in rows], dtype=torch.int64)
        next_B = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
        slots_R = slots_B[row_R]
        noise_RV = self._ring.rows(slots_R, next_B[row_R] + column_R)
        chosen_R = choose(logits_BPV[row_R, column_R], self._temperature_S[slots_R], noise_RV)
        chosen_BP = torch.full(counts_BP.shape, NO_TOKEN, dtype=torch.int64)
        chosen_BP[row_R, column_R] = chosen_R.cpu()
        return chosen_BP
