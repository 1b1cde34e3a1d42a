"""The sequences of a round as the tensors of one forward pass."""

from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.types import TokenId
from ssd_target.decoding.scheduler import Part
from ssd_target.decoding.sequence import Sequence


class BatchBuilder:
    """Builds batches; keeps the block tables of running sequences by slot. Step thread only."""

    def __init__(self, engine: EngineConfig, verify_columns: tuple[int, ...]) -> None:
        self._verify_columns = verify_columns
        self._chunk = engine.prefill_chunk
        shape_SJ = engine.max_num_seqs, engine.blocks_per_sequence
        self._block_tables_SJ = np.zeros(shape_SJ, dtype=np.int64)

    def set_blocks(self, slot: int, blocks: Rows[int]) -> None:
        """Write the block table of a sequence into its slot."""
        self._block_tables_SJ[slot] = 0
        self._block_tables_SJ[slot, : len(blocks)] = blocks

    def round(
        self,
        sequences: Rows[Sequence],
        proposals: Rows[tuple[TokenId, ...]],
        *,
        keeps_rows: bool = False,
        prompts: PagedBatch | None = None,
    ) -> PagedBatch:
        """Build the batch to verify: each sequence's newest token and its proposal.

        The rows of a verify are the fewest that fit all proposals, among the row counts with
        identical bits. For ``keeps_rows`` and ``prompts`` see ``PagedBatch``.
        """
        longest = max(map(len, proposals), default=0)
        columns = next(count for count in self._verify_columns if count > longest)
        # Small arrays: numpy takes a third of the time of torch after a forward pass.
        tokens_BP = np.zeros((len(sequences), columns), dtype=np.int64)
        for row_P, sequence, proposal in zip(tokens_BP, sequences, proposals, strict=True):
            row_P[0] = sequence.tokens[-1]
            if proposal:
                row_P[1 : len(proposal) + 1] = proposal
        slots_B = _ints(sequence.slot for sequence in sequences)
        first_B = _ints(len(sequence.tokens) - 1 for sequence in sequences)
        num_columns_B = _ints(len(proposal) + 1 for proposal in proposals)
        arrays = (tokens_BP, first_B, num_columns_B, self._block_tables_SJ[slots_B], slots_B)
        return PagedBatch(*map(torch.from_numpy, arrays), keeps_rows=keeps_rows, prompts=prompts)

    def prompts(self, parts: Rows[Part]) -> PagedBatch:
        """Build the batch that stores parts of prompts."""
        return self.stored(parts, self._chunk)

    def stored(self, parts: Rows[Part], granule: int) -> PagedBatch:
        """Build the batch that stores parts of texts, in multiples of ``granule`` columns."""
        longest = max(len(positions) for _, positions in parts)
        tokens_BP = np.zeros((len(parts), -(-longest // granule) * granule), dtype=np.int64)
        for row_P, (sequence, positions) in zip(tokens_BP, parts, strict=True):
            row_P[: len(positions)] = sequence.tokens[positions.start : positions.stop]
        slots_B = _ints(sequence.slot for sequence, _ in parts)
        first_B = _ints(positions.start for _, positions in parts)
        num_columns_B = _ints(len(positions) for _, positions in parts)
        arrays = (tokens_BP, first_B, num_columns_B, self._block_tables_SJ[slots_B])
        return PagedBatch(*map(torch.from_numpy, arrays))


def _ints(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)
