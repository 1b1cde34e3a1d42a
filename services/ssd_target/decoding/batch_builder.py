"""The sequences of a round as the tensors of one forward pass."""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.types import NO_TOKEN, SequenceId, TokenId
from ssd_target.decoding.scheduler import Prefill
from ssd_target.decoding.sequence import Sequence

Ints = NDArray[np.int64]
NO_TOKENS: tuple[TokenId, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposals of a round.

    ``tokens_BK`` int64, padded with ``NO_TOKEN``: the rows of a verify are the fewest that fit all
    proposals, among the row counts with identical bits, so its width can be less than K;
    ``num_proposed_B`` int64, 0..K. ``tokens`` holds the same ids on the host, without padding.
    """

    tokens_BK: torch.Tensor
    num_proposed_B: torch.Tensor
    tokens: tuple[tuple[TokenId, ...], ...]


class BatchBuilder:
    """Builds batches; keeps the block tables of running sequences by slot. Step thread only."""

    def __init__(self, engine: EngineConfig, verify_columns: tuple[int, ...]) -> None:
        self._verify_columns = verify_columns
        num_blocks = -(-engine.max_model_len // engine.block_size)
        self._block_tables_SJ = torch.zeros((engine.max_num_seqs, num_blocks), dtype=torch.int64)

    def admit(self, slot: int, blocks: Rows[int]) -> None:
        """Write the block table of a sequence into its slot."""
        row_J = torch.zeros(self._block_tables_SJ.shape[1], dtype=torch.int64)
        row_J[: len(blocks)] = torch.tensor(blocks, dtype=torch.int64)
        self._block_tables_SJ[slot] = row_J

    def proposals(
        self, sequences: Rows[Sequence], proposed: Mapping[SequenceId, tuple[TokenId, ...]]
    ) -> Proposals:
        """Gather the proposals of the sequences."""
        tokens = tuple(proposed.get(each.sequence_id, NO_TOKENS) for each in sequences)
        longest = max(map(len, tokens))
        columns = next(count for count in self._verify_columns if count > longest)
        tokens_BK = np.full((len(sequences), columns - 1), NO_TOKEN, dtype=np.int64)
        for index, proposal in enumerate(tokens):
            tokens_BK[index, : len(proposal)] = proposal
        num_proposed_B = np.fromiter((len(each) for each in tokens), np.int64, len(sequences))
        return Proposals(torch.from_numpy(tokens_BK), torch.from_numpy(num_proposed_B), tokens)

    def round(self, sequences: Rows[Sequence], proposals: Proposals) -> PagedBatch:
        """Build the batch to verify: each sequence's newest token and its proposal."""
        newest_B = torch.tensor([each.tokens[-1] for each in sequences], dtype=torch.int64)
        tokens_BP = torch.cat([newest_B[:, None], proposals.tokens_BK.clamp_min(0)], dim=1)
        first_B = torch.tensor([len(each.tokens) - 1 for each in sequences], dtype=torch.int64)
        slots_B = torch.tensor([each.slot for each in sequences], dtype=torch.int64)
        return PagedBatch(
            tokens_BP, first_B, proposals.num_proposed_B + 1, self._block_tables_SJ[slots_B]
        )

    def columns(
        self, slots_B: Ints, tokens_BP: Ints, first_B: Ints, num_columns_B: Ints
    ) -> PagedBatch:
        """Build a batch of any columns: those of sequence b begin at position ``first_B[b]``."""
        tables_BJ = self._block_tables_SJ[torch.from_numpy(slots_B)]
        return PagedBatch(
            torch.from_numpy(tokens_BP),
            torch.from_numpy(first_B),
            torch.from_numpy(num_columns_B),
            tables_BJ,
        )

    def prefill(self, work: Prefill, chunk: int) -> PagedBatch:
        """Build the batch that stores positions [first, last) of a prompt, padded to the chunk."""
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
