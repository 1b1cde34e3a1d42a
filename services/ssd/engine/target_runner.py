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

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssd.engine.attention.backend import AttentionBackend
from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.kv_cache.storage import KVStorage
from ssd.engine.models.registry import CausalModel
from ssd.engine.runner import ModelRunner, PreparedPass, Progress
from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")
MIN_ROWS = 2
"""Smallest number of rows of a pass. One row uses matrix-vector kernels, which sum in another
order: on AVX-512, packed fp32 linears of 1,536 inputs and more, and most bf16 ones, give other
bits."""
DIFFERENT_BITS = "one column has other logits than the same column among K+1"


class TargetRunner(ModelRunner):
    """Runs verifies over a paged KV storage. Step thread only."""

    def __init__(
        self,
        decoder: CausalModel,
        model: ModelConfig,
        engine: EngineConfig,
        backend: AttentionBackend,
        storage: KVStorage,
    ) -> None:
        super().__init__(decoder, model, engine, backend, storage)
        self.verify_columns: tuple[int, ...] = (engine.num_columns,)
        """Column counts that a verify may have, ascending; the last one fits every proposal."""
        self._buckets = sequence_buckets(engine)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> Tensor:
        """Verify P columns, or one column, of up to ``max_num_seqs`` sequences.

        Returns:
            fp32 logits [B, P, V]. Row i of a sequence selects the token after column i. Rows of
            padding columns are undefined. A row that is not finite affects no other row.
        """
        return self.verify(self.prepare(batch))

    @torch.inference_mode()
    def prepare(self, batch: PagedBatch) -> PreparedPass:
        """Pad a batch, compute its entries and masks: the part of ``forward`` before the model."""
        num_sequences, columns = batch.tokens_BP.shape
        padded = _pad_sequences(batch, self._bucket(num_sequences, columns))
        return self._prepare(padded, num_sequences)

    @torch.inference_mode()
    def verify(self, prepared: PreparedPass) -> Tensor:
        """Run a prepared batch; see ``forward``."""
        hidden_RD = self._run_prepared(prepared)
        logits_BPV = self._logits(hidden_RD, prepared.tokens_BP.shape[1])
        return logits_BPV[: prepared.num_sequences]

    def warm_up(self, on_progress: Progress) -> None:
        """Run every shape once, and compare verifies of one column with those of P columns.

        Afterwards ``verify_columns`` contains both if all linears are packed and the bits are the
        same.
        """
        self.verify_columns = (self.engine.num_columns,)
        if self._decoder.is_packed:
            self.verify_columns = self.engine.verify_columns
        super().warm_up(on_progress)

    def _warm_up_counts(self) -> Sequence[int]:
        return self._buckets

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

    def _bucket(self, num_sequences: int, columns: int) -> int:
        bucket = next(count for count in self._buckets if count >= num_sequences)
        return max(bucket, MIN_ROWS) if columns == 1 else bucket


def sequence_buckets(engine: EngineConfig) -> list[int]:
    """Return the sequence counts to which a pass is padded, ascending."""
    if engine.deterministic:
        return [engine.max_num_seqs]
    buckets = [1]
    while buckets[-1] < engine.max_num_seqs:
        buckets.append(min(buckets[-1] * 2, engine.max_num_seqs))
    return buckets


def _pad_sequences(batch: PagedBatch, count: int) -> PagedBatch:
    """Add sequences without columns."""
    missing = count - len(batch.first_positions_B)
    if missing == 0:
        return batch
    return PagedBatch(
        tokens_BP=pad(batch.tokens_BP, (0, 0, 0, missing)),
        first_positions_B=pad(batch.first_positions_B, (0, missing)),
        num_columns_B=pad(batch.num_columns_B, (0, missing)),
        block_tables_BJ=pad(batch.block_tables_BJ, (0, 0, 0, missing)),
    )
