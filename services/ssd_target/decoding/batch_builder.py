"""Rows of a round as the tensors of one forward pass, and the target's choice at each of them."""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from ssd.engine.batch import PagedBatch
from ssd.engine.sampling.choose import choose
from ssd.speculation.noise import NoiseRing
from ssd.types import SequenceId, TokenId
from ssd_target.decoding.scheduler import Prefill
from ssd_target.decoding.sequence import Sequence

NO_TOKENS: tuple[TokenId, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposals:
    """What each row of the round proposes.

    ``tokens_BK`` int64, padded with -1, which is never a token, and of width 0 in a round of one
    column; ``num_proposed_B`` int64, 0..K.
    ``tokens`` and ``num_proposed`` are the same for the bookkeeping.
    """

    tokens_BK: torch.Tensor
    num_proposed_B: torch.Tensor
    tokens: tuple[tuple[TokenId, ...], ...]


class BatchBuilder:
    """Block tables and noise of the running sequences, by slot. Step thread only.

    Arrays are allocated a round: for 16 rows of 7 columns that is cheaper than a lock around views.
    """

    def __init__(
        self, *, max_num_seqs: int, verify_columns: tuple[int, ...], num_blocks_each: int
    ) -> None:
        self._verify_columns = verify_columns
        self._block_tables_SJ = torch.zeros((max_num_seqs, num_blocks_each), dtype=torch.int64)

    def admit(self, sequence: Sequence) -> None:
        """Write the block table of a sequence into its slot."""
        row_J = torch.zeros(self._block_tables_SJ.shape[1], dtype=torch.int64)
        row_J[: len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int64)
        self._block_tables_SJ[sequence.slot] = row_J

    def proposals(
        self, rows: Rows[Sequence], proposed: Mapping[SequenceId, tuple[TokenId, ...]]
    ) -> Proposals:
        """Gather what the rows propose."""
        tokens = tuple(proposed.get(row.sequence_id, NO_TOKENS) for row in rows)
        columns = self._verify_columns[-1 if any(tokens) else 0]
        tokens_BK = np.full((len(rows), columns - 1), -1, dtype=np.int64)
        for index, row_tokens in enumerate(tokens):
            tokens_BK[index, : len(row_tokens)] = row_tokens
        num_proposed_B = np.fromiter((len(each) for each in tokens), np.int64, len(rows))
        return Proposals(torch.from_numpy(tokens_BK), torch.from_numpy(num_proposed_B), tokens)

    def round(self, rows: Rows[Sequence], proposals: Proposals) -> PagedBatch:
        """The batch that verifies: each row's newest token and what it proposes after it."""
        newest_B = torch.tensor([row.tokens[-1] for row in rows], dtype=torch.int64)
        tokens_BP = torch.cat([newest_B[:, None], proposals.tokens_BK.clamp_min(0)], dim=1)
        first_B = torch.tensor([len(row.tokens) - 1 for row in rows], dtype=torch.int64)
        slots_B = torch.tensor([row.slot for row in rows], dtype=torch.int64)
        return PagedBatch(
            tokens_BP, first_B, proposals.num_proposed_B + 1, self._block_tables_SJ[slots_B]
        )

    def prefill(self, work: Prefill, chunk: int) -> PagedBatch:
        """The batch that stores positions [first, last) of a prompt, padded to the chunk."""
        tokens_1P = torch.zeros((1, chunk), dtype=torch.int64)
        count = work.last - work.first
        prompt = work.sequence.tokens[work.first : work.last]
        tokens_1P[0, :count] = torch.tensor(prompt, dtype=torch.int64)
        slot = work.sequence.slot
        return PagedBatch(
            tokens_1P,
            torch.tensor([work.first]),
            torch.tensor([count]),
            self._block_tables_SJ[slot : slot + 1],
        )


class Sampler:
    """The target's own choice at every row that counts. Step thread only.

    Noise is kept by (slot, position) and computed once; ``fill`` is called while others work.
    """

    def __init__(self, ring: NoiseRing, *, num_columns: int, max_num_seqs: int) -> None:
        self._ring = ring
        self._num_columns = num_columns
        self._temperature_S = torch.zeros(max_num_seqs)

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence its noise."""
        sampling = sequence.arrival.request.sampling
        self._ring.assign(sequence.slot, sampling.seed, 0, sampling.temperature)
        self._temperature_S[sequence.slot] = sampling.temperature

    def release(self, sequence: Sequence) -> None:
        """Forget the noise of a sequence."""
        self._ring.release(sequence.slot)

    def fill(self, rows: Rows[Sequence]) -> None:
        """Compute the noise of all positions that the next round may choose; known ones stay."""
        for row in rows:
            first = len(row.tokens)
            self._ring.fill(row.slot, first, first + self._num_columns - 1)

    def choose(
        self, rows: Rows[Sequence], num_proposed_B: torch.Tensor, logits_BPV: torch.Tensor
    ) -> torch.Tensor:
        """What the target itself would say at each row, ``chosen_BP`` int64, -1 at padding."""
        self.fill(rows)
        column_P = torch.arange(logits_BPV.shape[1])
        counts_BP = column_P <= num_proposed_B[:, None]
        row_R, column_R = counts_BP.nonzero(as_tuple=True)
        slots_B = torch.tensor([row.slot for row in rows], dtype=torch.int64)
        next_B = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
        slots_R = slots_B[row_R]
        noise_RV = self._ring.rows(slots_R, next_B[row_R] + column_R)
        chosen_R = choose(logits_BPV[row_R, column_R], self._temperature_S[slots_R], noise_RV)
        chosen_BP = torch.full(counts_BP.shape, -1, dtype=torch.int64)
        chosen_BP[row_R, column_R] = chosen_R.cpu()
        return chosen_BP
