"""A draft's passes with dense attention over stored entries; see ``draft_graph``.

Stored entries are gathered once for all steps of a table: the own entries of all branches, which
its steps fill, then the trunk and the proposal. The entries of new rows are written to the KV
storage.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssd.engine.attention.context import whole_width
from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.memory import allocate_storage
from ssd.engine.models.decoder_weights import DecoderWeights
from ssd.engine.openvino_engine.draft_graph import Stored, build_graphs

ROW_STEP = 16
"""Chunks of a prompt are padded to multiples, since products compile a kernel for each shape."""
MOST_USED = 0.6
"""Sessions of different widths run in several passes if these have at most this share of the
entries of one padded pass. Each pass reads the weights."""


class OpenVinoDraft:
    """A graph and a KV storage; see ``DraftExecution``."""

    def __init__(self, weights: DecoderWeights, model: ModelConfig, engine: EngineConfig) -> None:
        self.attention_name = "openvino"
        self.num_parameters = 0
        self._group = model.num_heads // model.num_kv_heads
        self._num_layers = model.num_layers
        self._causal, self._branching = build_graphs(weights, model, engine)
        # After the weights have been packed: the rest of the memory is for the KV cache.
        self._storage = allocate_storage(model, engine)
        self._entries = self._storage.entries
        self.num_blocks = self._entries.num_blocks
        self._same_branch: dict[int, tuple[Tensor, Tensor]] = {}
        """Of N branches: mask of the rows of a step, and which own entries of a step they see."""
        for branches in engine.branch_counts:
            same_NN = torch.eye(branches, dtype=torch.bool)
            same_UN = same_NN.repeat_interleave(self._group, dim=0)
            self._same_branch[branches] = self._mask(same_NN), same_UN
        self._groups: list[tuple[Tensor, Stored]] = []
        self._table_slots_B: Tensor | None = None

    @torch.inference_mode()
    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        first, count = int(batch.first_positions_B[0]), int(batch.num_columns_B[0])
        rows = max(1, -(-count // ROW_STEP)) * ROW_STEP
        column_Q = torch.arange(rows)
        missing = max(0, rows - batch.tokens_BP.shape[1])
        tokens_BQ = pad(batch.tokens_BP[:, :rows], (0, missing))
        paged_BS = self._entries.paged(batch.block_tables_BJ)
        position_BQ = (first + column_Q)[None].clamp(max=paged_BS.shape[1] - 1)
        stored = self._gather_trunk(batch.block_tables_BJ, batch.first_positions_B, rows)
        graph = self._causal
        graph.see(stored, self._mask(column_Q <= column_Q[:, None]), tokens_BQ, 0)
        graph.run(tokens_BQ, position_BQ)
        entries_BQ = paged_BS.gather(1, position_BQ).where(column_Q < count, 0)
        self._store(entries_BQ, graph.new_entries())
        return graph.is_finite()

    @torch.inference_mode()
    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """See ``DraftExecution.run_proposals``."""
        tokens_BP = batch.tokens_BP
        columns = tokens_BP.shape[1]
        column_P = torch.arange(columns)
        stored = self._gather_trunk(batch.block_tables_BJ, batch.trunk_lengths_B, columns)
        graph = self._causal
        graph.see(stored, self._mask(column_P <= column_P[:, None]), tokens_BP)
        graph.run(tokens_BP, batch.trunk_lengths_B[:, None] + column_P)
        proposal_BP = self._entries.proposal(batch.slots_B)
        is_real_BP = column_P < batch.num_columns_B[:, None]
        self._store(proposal_BP.where(is_real_BP, 0), graph.new_entries())
        return graph.logits(tokens_BP)

    @torch.inference_mode()
    def run_branches(self, batch: BranchBatch) -> Tensor:
        """See ``DraftExecution.run_branches``.

        Sessions with much shorter trunks than others run in a pass of their own.
        """
        own_BPN = self._entries.own(batch.slots_B, batch.tokens_BN.shape[1])
        if batch.step == 0 or batch.slots_B is not self._table_slots_B:
            self._groups = [
                (rows, self._gather_table(_rows_of(batch, rows), own_BPN[rows]))
                for rows in group_by_width(batch.trunk_lengths_B, own_BPN[0].numel())
            ]
            self._table_slots_B = batch.slots_B
        if len(self._groups) == 1:
            return self._run_step(batch, own_BPN, self._groups[0][1])
        parts = [
            self._run_step(_rows_of(batch, rows), own_BPN[rows], stored).clone()
            for rows, stored in self._groups
        ]
        order = torch.cat([rows for rows, _ in self._groups]).argsort()
        return torch.cat(parts)[order]

    def _run_step(self, batch: BranchBatch, own_BPN: Tensor, stored: Stored) -> Tensor:
        tokens_BN = batch.tokens_BN
        graph = self._branching
        graph.see(stored, self._same_branch[tokens_BN.shape[1]][0], tokens_BN)
        graph.run(tokens_BN, batch.trunk_lengths_B[:, None] + 1 + batch.accepted_BN + batch.step)
        new_L2RW = graph.new_entries()
        self._store(own_BPN[:, batch.step], new_L2RW)
        self._keep_own(stored, batch.step, new_L2RW, tokens_BN.shape[1])
        return graph.logits(tokens_BN)

    @torch.inference_mode()
    def append_proposal(
        self,
        slots_B: Tensor,
        num_entries_B: Tensor,
        trunk_lengths_B: Tensor,
        block_tables_BJ: Tensor,
    ) -> None:
        """See ``DraftExecution.append_proposal``."""
        self._storage.append_proposal(slots_B, num_entries_B, trunk_lengths_B, block_tables_BJ)

    @torch.inference_mode()
    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> None:
        """See ``DraftExecution.promote_branches``."""
        self._storage.promote_branches(slots_B, branches_B)

    def _gather_trunk(self, tables_BJ: Tensor, lengths_B: Tensor, rows: int) -> Stored:
        """Gather the trunks for ``rows`` rows that see all of them."""
        trunk_BS, in_trunk_BS = self._entries.trunk(tables_BJ, lengths_B)
        return self._gather(trunk_BS, in_trunk_BS[:, None].expand(-1, rows, -1), 0)

    def _gather_table(self, batch: BranchBatch, own_BPN: Tensor) -> Stored:
        """Gather trunk and proposal, which each branch sees up to its accepted length."""
        columns, branches = own_BPN.shape[1:]
        trunk_BS, in_trunk_BS = self._entries.trunk(batch.block_tables_BJ, batch.trunk_lengths_B)
        is_accepted_BNP = torch.arange(columns) <= batch.accepted_BN[:, :, None]
        in_trunk_BNS = in_trunk_BS[:, None].expand(-1, branches, -1)
        entries_BS = torch.cat((trunk_BS, self._entries.proposal(batch.slots_B)), dim=1)
        visible_BNS = torch.cat((in_trunk_BNS, is_accepted_BNP), dim=2)
        stored = self._gather(entries_BS, visible_BNS, columns * branches)
        for step in range(batch.step):
            own_R = own_BPN[:, step].flatten()
            self._keep_own(stored, step, self._storage.entries_L2ZW[:, :, own_R], branches)
        return stored

    def _gather(self, entries_BS: Tensor, visible_BQS: Tensor, num_own: int) -> Stored:
        """Gather entries behind ``num_own`` columns that no row sees yet."""
        batch, used = entries_BS.shape
        width = whole_width(max(1, num_own + used))
        heads, size = self._storage.shape_GE
        gathered_XBGSE = torch.zeros((2 * self._num_layers, batch, heads, width, size))
        columns = slice(num_own, num_own + used)
        index_Z = entries_BS.flatten()
        for entries_ZW, part_BGSE in zip(
            self._storage.entries_L2ZW.flatten(0, 1), gathered_XBGSE, strict=True
        ):
            found_BSGE = entries_ZW.index_select(0, index_Z).view(batch, used, heads, size)
            part_BGSE[:, :, columns] = found_BSGE.transpose(1, 2)
        mask_BQS = torch.full((batch, visible_BQS.shape[1], width), -torch.inf)
        mask_BQS[:, :, columns].masked_fill_(visible_BQS, 0.0)
        return Stored(gathered_XBGSE, mask_BQS.repeat_interleave(self._group, dim=1)[:, None])

    def _mask(self, visible_QQ: Tensor) -> Tensor:
        """Return the additive mask of the new rows, [1, 1, U, Q]."""
        mask_QQ = torch.zeros(visible_QQ.shape).masked_fill_(~visible_QQ, -torch.inf)
        return mask_QQ.repeat_interleave(self._group, dim=0)[None, None]

    def _store(self, entries_BQ: Tensor, new_L2RW: Tensor) -> None:
        """Write the entries of a pass to the storage."""
        self._storage.entries_L2ZW[:, :, entries_BQ.flatten()] = new_L2RW

    def _keep_own(self, stored: Stored, step: int, own_L2RW: Tensor, branches: int) -> None:
        """Add the entries of a step to the stored ones, each visible to its branch."""
        own = slice(step * branches, (step + 1) * branches)
        shape = (2 * self._num_layers, -1, branches, *self._storage.shape_GE)
        own_XBNGE = own_L2RW.reshape(shape)
        stored.entries_XBGSE[:, :, :, own] = own_XBNGE.transpose(2, 3)
        stored.mask_B1US[..., own].masked_fill_(self._same_branch[branches][1], 0.0)


def group_by_width(trunk_lengths_B: Tensor, num_own: int) -> list[Tensor]:
    """Return the rows of sessions that share a pass; one group unless padding takes too long."""
    widths = [whole_width(num_own + int(length)) for length in trunk_lengths_B]
    groups = [
        [row for row, width in enumerate(widths) if width.bit_length() == size]
        for size in sorted({width.bit_length() for width in widths})
    ]
    used = sum(len(rows) * max(widths[row] for row in rows) for rows in groups)
    if used > MOST_USED * len(widths) * max(widths):
        groups = [list(range(len(widths)))]
    return [torch.tensor(rows) for rows in groups]


def _rows_of(batch: BranchBatch, rows: Tensor) -> BranchBatch:
    return replace(
        batch,
        slots_B=batch.slots_B[rows],
        tokens_BN=batch.tokens_BN[rows],
        accepted_BN=batch.accepted_BN[rows],
        trunk_lengths_B=batch.trunk_lengths_B[rows],
        block_tables_BJ=batch.block_tables_BJ[rows],
    )
