"""The draft's forward passes: proposals, and one step of all branches.

A session's KV entries are its trunk (pages), its proposal segment and its own segment; see
``kv_cache/storage.py``. The number of sessions is not padded, so each number is a shape.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd.engine.attention.backend import AttentionBackend
from ssd.engine.attention.context import ContextRun, first_entries, widen
from ssd.engine.batch import BranchBatch, ProposalBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.kv_cache.storage import KVStorage, fit_block_tables
from ssd.engine.models.registry import CausalModel
from ssd.engine.runner import ModelRunner


class DraftRunner(ModelRunner):
    """Runs the passes of a draft's tree. Step thread only."""

    def __init__(
        self,
        decoder: CausalModel,
        model: ModelConfig,
        engine: EngineConfig,
        backend: AttentionBackend,
        storage: KVStorage,
    ) -> None:
        super().__init__(decoder, model, engine, backend, storage)
        self._branch_context: ContextRun | None = None
        self._context_slots_B: Tensor | None = None
        self._num_shared = 0

    @torch.inference_mode()
    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """Run the newest token and the proposal of each session, and fill the proposal segments.

        Returns:
            fp32 logits [B, P, V].
        """
        num_sequences, columns = batch.tokens_BP.shape
        column_P = torch.arange(columns)
        is_real_BP = column_P < batch.num_columns_B[:, None]
        proposal_BP = self._entries.proposal(batch.slots_B)
        trunk_BS, in_trunk_BS = self._trunk(batch.block_tables_BJ, batch.trunk_lengths_B)
        visible_BPS = torch.cat(
            (
                in_trunk_BS[:, None].expand(-1, columns, -1),
                (column_P <= column_P[:, None]).expand(num_sequences, -1, -1),
            ),
            dim=2,
        )
        run = self._whole_context(torch.cat((trunk_BS, proposal_BP), dim=1), visible_BPS)
        positions_BP = batch.trunk_lengths_B[:, None] + column_P
        hidden_RD = self._run(
            batch.tokens_BP, positions_BP, proposal_BP.where(is_real_BP, 0), [run], is_whole=True
        )
        return self._logits(hidden_RD, columns)

    @torch.inference_mode()
    def run_branches(self, batch: BranchBatch) -> Tensor:
        """Run one step of all branches.

        Steps run in order from 0. The entries, accepted lengths and trunks apply to all steps with
        the same tensor ``slots_B``.

        Returns:
            fp32 logits [B, N, V].
        """
        branches = batch.tokens_BN.shape[1]
        own_BPN = self._entries.own(batch.slots_B)
        if batch.step == 0 or batch.slots_B is not self._context_slots_B:
            self._branch_context, self._num_shared = self._branch_run(batch, own_BPN)
            self._context_slots_B = batch.slots_B
        assert self._branch_context is not None
        run = first_entries(self._branch_context, self._num_shared + (batch.step + 1) * branches)
        positions_BN = batch.trunk_lengths_B[:, None] + 1 + batch.accepted_BN + batch.step
        hidden_RD = self._run(
            batch.tokens_BN, positions_BN, own_BPN[:, batch.step], [run], is_whole=True
        )
        return self._logits(hidden_RD, branches)

    @torch.inference_mode()
    def append_proposal(
        self,
        slots_B: Tensor,
        num_entries_B: Tensor,
        trunk_lengths_B: Tensor,
        block_tables_BJ: Tensor,
    ) -> None:
        """Append the first ``num_entries`` proposal columns to the trunks.

        The tables must contain the pages of positions trunk_length..trunk_length+num_entries-1.
        """
        column_P = torch.arange(self.engine.num_columns)
        is_kept_BP = column_P < num_entries_B[:, None]
        paged_BS = self._entries.paged(block_tables_BJ)
        position_BP = (trunk_lengths_B[:, None] + column_P).clamp_(max=paged_BS.shape[1] - 1)
        to_BP = paged_BS.gather(1, position_BP)
        from_BP = self._entries.proposal(slots_B)
        self._storage.copy(from_BP[is_kept_BP], to_BP[is_kept_BP])

    @torch.inference_mode()
    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> None:
        """Copy the own entries of one branch of each session into its proposal segment."""
        own_BPN = self._entries.own(slots_B)
        index_BP1 = branches_B[:, None, None].expand(-1, own_BPN.shape[1], 1)
        from_BP = own_BPN.gather(2, index_BP1).squeeze(2)
        self._storage.copy(from_BP.flatten(), self._entries.proposal(slots_B).flatten())

    def _warm_up_counts(self) -> Sequence[int]:
        return range(1, self.engine.max_num_seqs + 1)

    def _warm_up(self, count: int) -> None:
        slot_B, zero_B = torch.arange(count), torch.zeros(count, dtype=torch.int64)
        table_B1 = zero_B[:, None]
        tokens_BP = zero_B[:, None].expand(-1, self.engine.num_columns)
        one_B = zero_B + 1
        self.run_proposals(ProposalBatch(slot_B, tokens_BP, one_B, one_B, table_B1))
        tokens_BN = zero_B[:, None].expand(-1, self.engine.branches)
        self.run_branches(BranchBatch(slot_B, tokens_BN, tokens_BN, 0, one_B, table_B1))

    def _trunk(self, block_tables_BJ: Tensor, trunk_lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of the trunks, in whole blocks, and which entries are in use."""
        width = self.engine.block_size
        num_blocks = -(-int(trunk_lengths_B.max()) // width)
        num_entries = num_blocks * width
        tables_BJ = fit_block_tables(block_tables_BJ, num_blocks)
        in_use_BS = torch.arange(num_entries) < trunk_lengths_B[:, None]
        return self._entries.paged(tables_BJ), in_use_BS

    def _branch_run(self, batch: BranchBatch, own_BPN: Tensor) -> tuple[ContextRun, int]:
        """Build the context of the last step; count the entries that all branches share.

        Earlier steps see a prefix of these entries.
        """
        num_sequences, branches = batch.tokens_BN.shape
        columns = self.engine.num_columns
        trunk_BS, in_trunk_BS = self._trunk(batch.block_tables_BJ, batch.trunk_lengths_B)
        proposal_BP = self._entries.proposal(batch.slots_B)
        same_branch_NX = torch.eye(branches, dtype=torch.bool).repeat(1, columns)
        visible_BNS = torch.cat(
            (
                in_trunk_BS[:, None].expand(-1, branches, -1),
                torch.arange(columns) <= batch.accepted_BN[:, :, None],
                same_branch_NX.expand(num_sequences, -1, -1),
            ),
            dim=2,
        )
        entries_BS = torch.cat((trunk_BS, proposal_BP, own_BPN.flatten(1)), dim=1)
        return self._whole_context(entries_BS, visible_BNS), trunk_BS.shape[1] + columns

    def _whole_context(self, entries_BS: Tensor, visible_BQS: Tensor) -> ContextRun:
        entries_BS, visible_BQS = widen(entries_BS, visible_BQS)
        return self._context(entries_BS[None], visible_BQS[None])
