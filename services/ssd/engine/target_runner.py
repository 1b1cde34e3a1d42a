"""The target's forward passes: ``verify``, of which plain decoding is the case with one column.

*Same shape, same bits*: a verify has P columns, or one if no sequence has a proposal. Sequences are
padded to a few counts. Attention runs over context chunks of fixed width, merged in a fixed order.
In deterministic mode there is one shape only, so the bits of a row do not depend on its column, on
the other sequences of the batch or on speculation.

*Decision*: the fast mode has the one-column shape where all linears are packed and the warm-up
finds the same bits in both shapes. *Because*: with the pair widened 4x, 8 sequences took 31 ms
instead of 91 in bf16. Packed linears sum in one order from 2 rows on (bf16 and fp32, AVX-512 and
AVX2, weights up to 1024 x 14336); plain ones do not: 7 and 16 rows differ. *Not chosen*: packing as
the only condition, which is proved for the measured CPUs only; the comparison as the only
condition, since rounding to bf16 hides rare differences; one shape for each proposal length, since
start-up time and the number of CUDA graphs grow with it. *Revisit when* most proposals are shorter
than K.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.execution import TargetExecution
from ssd.engine.runner import ModelRunner, Progress
from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")
DIFFERENT_BITS = "one column has other logits than the same column among K+1"


class TargetRunner(ModelRunner):
    """Runs verifies over a paged KV storage. Step thread only."""

    execution: TargetExecution

    def __init__(
        self, execution: TargetExecution, model: ModelConfig, engine: EngineConfig
    ) -> None:
        super().__init__(execution, model, engine)
        self._joins_chunks = execution.packs_rows
        self.verify_columns: tuple[int, ...] = (engine.num_columns,)
        """Column counts that a verify may have, ascending; the last one fits every proposal."""

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows of a sequence whose times differ, ascending; their bits are the same."""
        if self.execution.packs_rows and len(self.verify_columns) > 1:
            return tuple(range(1, self.engine.num_columns + 1))
        return self.verify_columns

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> Tensor:
        """Verify P columns, or one column, of up to ``max_num_seqs`` sequences.

        Returns:
            fp32 logits [B, P, V]. Row i of a sequence selects the token after column i. Rows of
            padding columns are undefined. A row that is not finite affects no other row.
        """
        return self.verify(self.prepare(batch)).clone()

    @torch.inference_mode()
    def prepare(self, batch: PagedBatch) -> Any:
        """Compute entries and masks: the part of ``forward`` before the model."""
        return self.execution.prepare(batch)

    @torch.inference_mode()
    def verify(self, prepared: Any) -> Tensor:
        """Run a prepared batch; see ``forward``."""
        return self._without_padding_ids(self.execution.verify(prepared))

    def verify_seconds(self) -> float | None:
        """See ``TargetExecution.verify_seconds``."""
        return self.execution.verify_seconds()

    def warm_up(self, on_progress: Progress) -> None:
        """Run every shape once, and compare verifies of one column with those of P columns.

        Afterwards ``verify_columns`` contains both if the engine allows it and the bits are the
        same.
        """
        self.verify_columns = (self.engine.num_columns,)
        if self.execution.is_narrow_exact:
            self.verify_columns = self.engine.verify_columns
        super().warm_up(on_progress)

    def _warm_up_counts(self) -> Sequence[int]:
        return self.execution.sequence_counts

    def _warm_up(self, count: int) -> None:
        """Verify ``count`` copies of one text: with P columns, then its last column alone."""
        columns = self.engine.num_columns
        zero_B = torch.zeros(count, dtype=torch.int64)
        tokens_BP = (torch.arange(columns) * 7919 % self.model.vocab_size).expand(count, -1)
        # No sequence exists yet, so the first blocks are free.
        blocks_J = torch.arange(1, self.num_blocks)[: -(-columns // self.engine.block_size)]
        tables_BJ = blocks_J.expand(count, -1)
        wide_BPV = self.forward(PagedBatch(tokens_BP, zero_B, zero_B + columns, tables_BJ))
        if 1 not in self.verify_columns:
            return
        narrow_B1V = self.forward(
            PagedBatch(tokens_BP[:, -1:], zero_B + columns - 1, zero_B + 1, tables_BJ)
        )
        if not torch.equal(narrow_B1V[:, 0], wide_BPV[:, -1]):
            self.verify_columns = (columns,)
            _log.info("narrow_verify_off", sequences=count, reason=DIFFERENT_BITS)
