"""The draft's forward passes: proposals, and one step of all branches.

A session's KV entries are its trunk (pages), its proposal segment and its own segment; see
``kv_cache/storage.py``. The number of sessions is not padded, so each number is a shape.
"""

import numpy as np
import torch
from torch import Tensor

from ssd.engine.batch import (
    AppendBatch,
    BranchBatch,
    PagedBatch,
    ProposalBatch,
    RowFilters,
    StoredNoise,
)
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.execution import DraftExecution
from ssd.engine.runner import ModelRunner, Progress


class DraftRunner(ModelRunner):
    """Implements ``TreeRunner``. Step thread only."""

    execution: DraftExecution

    def __init__(self, execution: DraftExecution, model: ModelConfig, engine: EngineConfig) -> None:
        super().__init__(execution, model, engine)
        self.whole_tables = execution.whole_tables
        self.end_session = execution.end_session
        self.append_proposal = execution.append_proposal
        self.promote_branches = execution.promote_branches

    @torch.inference_mode()
    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """See ``TreePasses.run_proposals``."""
        return self._without_padding_ids(self.execution.run_proposals(batch))

    @torch.inference_mode()
    def run_branches(self, batch: BranchBatch) -> Tensor:
        """See ``TreePasses.run_branches``."""
        return self._without_padding_ids(self.execution.run_branches(batch))

    @torch.inference_mode()
    def run_columns(self, batch: BranchBatch, noise: StoredNoise) -> tuple[Tensor, Tensor]:
        """See ``TreePasses.run_columns``."""
        tokens_KBN, logits_PBNV = self.execution.run_columns(batch, noise)
        return tokens_KBN, self._without_padding_ids(logits_PBNV)

    def warm_up(self, on_progress: Progress) -> None:
        """See ``ModelRunner.warm_up``."""
        zero_B = torch.zeros(1, dtype=torch.int64)
        tokens_BP = torch.zeros((1, self.engine.prefill_chunk), dtype=torch.int64)
        sizes = self.execution.chunk_sizes
        num_passes = len(sizes) + self.engine.max_num_seqs
        for done, size in enumerate(sizes, start=1):
            self.prefill(PagedBatch(tokens_BP, zero_B, zero_B + size, zero_B[:, None]))
            on_progress("warm-up", done / num_passes)
        for count in range(1, self.engine.max_num_seqs + 1):
            self._warm_up(count)
            on_progress("warm-up", (len(sizes) + count) / num_passes)
        self.execution.free_weights()

    def _warm_up(self, count: int) -> None:
        """Run the passes of ``count`` sessions once."""
        slot_B, zero_B = torch.arange(count), torch.zeros(count, dtype=torch.int64)
        table_B1 = zero_B[:, None]
        tokens_BP = zero_B[:, None].expand(-1, self.engine.num_columns)
        one_B = zero_B + 1
        for columns_B in (one_B, one_B * self.engine.num_columns):
            self.run_proposals(ProposalBatch(slot_B, tokens_BP, columns_B, one_B, table_B1))
        for branches in self.engine.branch_counts:
            tokens_BN = zero_B[:, None].expand(-1, branches)
            batch = BranchBatch(slot_B, tokens_BN, tokens_BN, 0, one_B, table_B1)
            self.run_branches(batch)
            if count == 1:
                self._warm_up_whole(batch)
        self.append_proposal(AppendBatch(slot_B, zero_B, zero_B, table_B1))
        self.promote_branches(slot_B, zero_B)
        self.end_session(0)

    def _warm_up_whole(self, batch: BranchBatch) -> None:
        """Build the whole tables with this batch as step 0."""
        branches = batch.tokens_BN.shape[1]
        no_noise_YV = torch.zeros((1, self.model.vocab_size))
        lowest_R = np.full(branches, -np.inf, dtype=np.float32)
        for length in [columns for count, columns in self.whole_tables if count == branches]:
            rows_KR = np.zeros((length, branches), dtype=np.int64)
            for filters in (None, RowFilters(rows_KR[0] + 1, lowest_R)):
                zero_R = torch.zeros(branches)
                self.run_columns(batch, StoredNoise(zero_R, no_noise_YV, rows_KR, filters))
