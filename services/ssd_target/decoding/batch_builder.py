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
from ssd_target.decoding.scheduler import Stored
from ssd_target.decoding.sequence import Sequence

Ints = NDArray[np.int64]
NO_TOKENS: tuple[TokenId, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposals of a round.

    ``tokens_BK``, padded with ``NO_TOKEN``: the rows of a verify are the fewest that fit all
    proposals, among the row counts with identical bits, so its width can be less than K;
    ``num_proposed_B``, 0..K. ``tokens`` holds the same ids on the host, without padding.
    """

    tokens_BK: Ints
    num_proposed_B: Ints
    tokens: tuple[tuple[TokenId, ...], ...]


class BatchBuilder:
    """Builds batches; keeps the block tables of running sequences by slot. Step thread only."""

    def __init__(self, engine: EngineConfig, verify_columns: tuple[int, ...]) -> None:
        self._verify_columns = verify_columns
        num_blocks = -(-engine.max_model_len // engine.block_size)
        self._block_tables_SJ = np.zeros((engine.max_num_seqs, num_blocks), dtype=np.int64)

    def set_blocks(self, slot: int, blocks: Rows[int]) -> None:
        """Write the block table of a sequence into its slot."""
        self._block_tables_SJ[slot] = 0
        self._block_tables_SJ[slot, : len(blocks)] = blocks

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
        return Proposals(tokens_BK, num_proposed_B, tokens)

    def round(self, sequences: Rows[Sequence], proposals: Proposals) -> PagedBatch:
        """Build the batch to verify: each sequence's newest token and its proposal."""
        # Small arrays: numpy takes a third of the time of torch after a forward pass.
        tokens_BP = np.empty((len(sequences), proposals.tokens_BK.shape[1] + 1), dtype=np.int64)
        tokens_BP[:, 0] = [each.tokens[-1] for each in sequences]
        np.maximum(proposals.tokens_BK, 0, out=tokens_BP[:, 1:])
        first_B = np.array([len(each.tokens) - 1 for each in sequences])
        slots_B = np.array([each.slot for each in sequences])
        tables_BJ, num_columns_B = self._block_tables_SJ[slots_B], proposals.num_proposed_B + 1
        arrays = (tokens_BP, first_B, num_columns_B, tables_BJ, slots_B)
        return PagedBatch(*map(torch.from_numpy, arrays))

    def columns(
        self, slots_B: Ints, tokens_BP: Ints, first_B: Ints, num_columns_B: Ints
    ) -> PagedBatch:
        """Build a batch of any columns: those of sequence b begin at position ``first_B[b]``."""
        tables_BJ = self._block_tables_SJ[slots_B]
        return PagedBatch(*map(torch.from_numpy, (tokens_BP, first_B, num_columns_B, tables_BJ)))

    def stored(self, works: Rows[Stored], granule: int) -> PagedBatch:
        """Build the batch that stores parts of texts, in multiples of ``granule`` columns."""
        longest = max(work.last - work.first for work in works)
        tokens_BP = np.zeros((len(works), -(-longest // granule) * granule), dtype=np.int64)
        for row_P, work in zip(tokens_BP, works, strict=True):
            row_P[: work.last - work.first] = work.sequence.tokens[work.first : work.last]
        slots_B = np.array([work.sequence.slot for work in works])
        first_B = np.array([work.first for work in works])
        last_B = np.array([work.last for work in works])
        return self.columns(slots_B, tokens_BP, first_B, last_B - first_B)
