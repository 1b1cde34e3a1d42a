"""A draft's passes with dense attention over stored entries; see ``draft_graph``.

New entries are written to the KV storage. Tables read trunks and proposals from a dense copy, to
which each table adds what was committed since the one before.
"""

from dataclasses import replace

import openvino
import torch
from torch import Tensor
from torch.nn.functional import pad

from ssd.engine.attention.context import whole_width
from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch, StoredNoise
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.kv_cache.storage import KVStorage
from ssd.engine.memory import allocate_storage
from ssd.engine.models.decoder_weights import DecoderWeights
from ssd.engine.openvino_engine.draft_graph import DraftGraph, DraftGraphs, PassInputs
from ssd.engine.openvino_engine.table_graph import TableGraph

ROW_STEP = 16
"""Chunks of a prompt are padded to multiples, since products compile a kernel for each shape."""
MOST_USED = 0.6
"""Sessions of different widths run in several passes if these have at most this share of the
entries of one padded pass. Each pass reads the weights."""


class Tables:
    """Entries and logits of tables that are built together, in the form of the graph.

    Stored entries are the proposal, then the trunk. The object is used again for later tables of
    the same sessions.
    """

    def __init__(self, storage: KVStorage, model: ModelConfig, batch: BranchBatch) -> None:
        """Allocate, without entries."""
        sessions, self._branches = batch.tokens_BN.shape
        self._storage = storage
        self._columns = storage.entries.num_columns
        self._group = model.num_heads // model.num_kv_heads
        self.num_read_B = [0] * sessions
        """Entries of each trunk that are in the copy."""
        longest = int(batch.trunk_lengths_B.max())
        self._width = whole_width(self._columns + longest)
        shape_XBG = (2 * model.num_layers, sessions, model.num_kv_heads)
        self._stored_XBGSE = torch.zeros((*shape_XBG, self._width, model.head_size))
        self._own_XBGNPE = torch.zeros((*shape_XBG, self._branches, self._columns, model.head_size))
        self._own_BPN = self._first_BN = torch.empty(0)
        """Own entries in the storage, and the positions of step 0. Set by ``begin``."""
        num_queries = self._branches * self._group
        self._mask_B1US = torch.full((sessions, 1, num_queries, self._width), -torch.inf)
        same_1NN = torch.eye(self._branches, dtype=torch.bool)[None]
        self._inputs = PassInputs(
            self._stored_XBGSE, self._mask_B1US, self._own_XBGNPE, mask_of(same_1NN, self._group)
        )
        rows = sessions * self._branches
        self._logits_PRV = torch.empty((self._columns, rows, model.vocab_size))
        self._outputs = [
            openvino.Tensor(each.numpy(), shared_memory=True) for each in self._logits_PRV
        ]

    def precedes(self, batch: BranchBatch) -> bool:
        """Return whether a batch of the same sessions has the same shape and longer trunks."""
        lengths = batch.trunk_lengths_B.tolist()
        return (
            batch.tokens_BN.shape[1] == self._branches
            and whole_width(self._columns + max(lengths)) == self._width
            and all(now >= read for now, read in zip(lengths, self.num_read_B, strict=True))
        )

    def begin(self, batch: BranchBatch) -> None:
        """Read proposals, new entries of the trunks, and own entries of the steps before."""
        columns, entries = self._columns, self._storage.entries
        self._first_BN = batch.trunk_lengths_B[:, None] + 1 + batch.accepted_BN
        self._read(slice(None), slice(columns), entries.proposal(batch.slots_B))
        is_seen_BNP = torch.arange(columns) <= batch.accepted_BN[:, :, None]
        self._mask_B1US[..., :columns] = mask_of(is_seen_BNP, self._group)
        paged_BS = entries.paged(batch.block_tables_BJ)
        for row, length in enumerate(batch.trunk_lengths_B.tolist()):
            first = self.num_read_B[row]
            where = slice(columns + first, columns + length)
            self._read(slice(row, row + 1), where, paged_BS[row : row + 1, first:length])
            self._mask_B1US[row, ..., where] = 0.0
            self.num_read_B[row] = length
        self._inputs.own_mask_O[:] = -torch.inf
        self._own_BPN = entries.own(batch.slots_B, self._branches)
        for step in range(batch.step):
            self._add_own(step, self._storage.select(self._own_BPN[:, step]))

    def run(self, graph: DraftGraph, batch: BranchBatch) -> Tensor:
        """Run a step; returns logits [B, N, V], valid until the next table."""
        positions_BN = self._first_BN + batch.step
        graph.run(self._inputs, batch.tokens_BN, positions_BN, self._outputs[batch.step])
        new_XBGNE = graph.new_entries(len(self._stored_XBGSE))
        self._storage.put(self._own_BPN[:, batch.step], new_XBGNE)
        self._add_own(batch.step, new_XBGNE)
        return self._logits_PRV[batch.step].view(*batch.tokens_BN.shape, -1)

    def run_columns(
        self, graph: TableGraph, batch: BranchBatch, noise: StoredNoise
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all steps but the last one; see ``DraftExecution.run_columns``."""
        lookahead = self._columns - 1
        tokens_KN = graph.run(self._inputs.tensors, self._outputs[:-1], batch, noise)
        own_XBGNKE = graph.own_entries()[:, None]
        own_BKN = self._own_BPN[:, :lookahead]
        self._storage.put(own_BKN.flatten(1), own_XBGNKE.transpose(3, 4).flatten(3, 4))
        self._own_XBGNPE[..., :lookahead, :] = own_XBGNKE
        self._inputs.own_mask_O[:lookahead] = 0.0
        return tokens_KN[:, None], [each[None] for each in self._logits_PRV[:-1]]

    def _read(self, rows: slice, columns: slice, entries_BS: Tensor) -> None:
        self._stored_XBGSE[:, rows, :, columns] = self._storage.select(entries_BS)

    def _add_own(self, step: int, own_XBGNE: Tensor) -> None:
        self._own_XBGNPE[..., step, :] = own_XBGNE
        self._inputs.own_mask_O[step] = 0.0


class OpenVinoDraft:
    """Graphs and a KV storage; see ``DraftExecution``."""

    def __init__(self, weights: DecoderWeights, model: ModelConfig, engine: EngineConfig) -> None:
        self.attention_name = "openvino"
        self.num_parameters = 0
        self._model = model
        self._group = model.num_heads // model.num_kv_heads
        self._graphs = DraftGraphs(weights, model, engine)
        self.whole_branches = self._graphs.tables.keys()
        # After the weights have been packed: the rest of the memory is for the KV cache.
        self._storage = allocate_storage(model, engine)
        self._entries = self._storage.entries
        self.num_blocks = self._entries.num_blocks
        self._tables: dict[tuple[int, ...], Tables] = {}
        """The newest tables, by the slots of their sessions."""
        self._parts: list[tuple[Tensor, Tables]] = []
        """Rows and tables of the newest step."""
        self._parts_slots_B: Tensor | None = None

    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        # A new session may have the slot and the blocks of one whose trunk was read.
        self._tables.clear()
        first, count = int(batch.first_positions_B[0]), int(batch.num_columns_B[0])
        rows = max(1, -(-count // ROW_STEP)) * ROW_STEP
        column_Q = torch.arange(rows)
        missing = max(0, rows - batch.tokens_BP.shape[1])
        tokens_BQ = pad(batch.tokens_BP[:, :rows], (0, missing))
        paged_BS = self._entries.paged(batch.block_tables_BJ)
        position_BQ = (first + column_Q)[None].clamp(max=paged_BS.shape[1] - 1)
        inputs = self._causal_inputs(
            batch.block_tables_BJ, batch.first_positions_B, rows, needs_logits=False
        )
        self._graphs.causal.run(inputs, tokens_BQ, position_BQ)
        self._store(paged_BS.gather(1, position_BQ).where(column_Q < count, 0))
        return self._graphs.causal.is_finite()

    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """See ``DraftExecution.run_proposals``."""
        columns = batch.tokens_BP.shape[1]
        column_P = torch.arange(columns)
        inputs = self._causal_inputs(batch.block_tables_BJ, batch.trunk_lengths_B, columns)
        positions_BP = batch.trunk_lengths_B[:, None] + column_P
        self._graphs.causal.run(inputs, batch.tokens_BP, positions_BP)
        is_real_BP = column_P < batch.num_columns_B[:, None]
        self._store(self._entries.proposal(batch.slots_B).where(is_real_BP, 0))
        return self._graphs.causal.logits().view(*batch.tokens_BP.shape, -1)

    def run_branches(self, batch: BranchBatch) -> Tensor:
        """See ``DraftExecution.run_branches``.

        Sessions with much shorter trunks than others run in a pass of their own.
        """
        if batch.step == 0 or batch.slots_B is not self._parts_slots_B:
            self._parts = [
                (rows, self._tables_of(_rows_of(batch, rows)))
                for rows in group_by_width(batch.trunk_lengths_B)
            ]
            self._parts_slots_B = batch.slots_B
        sessions, branches = batch.tokens_BN.shape
        if len(self._parts) == 1:
            graph = self._graphs.branching(sessions, branches)
            return self._parts[0][1].run(graph, batch)
        found = [
            tables.run(self._graphs.branching(len(rows), branches), _rows_of(batch, rows))
            for rows, tables in self._parts
        ]
        order = torch.cat([rows for rows, _ in self._parts]).argsort()
        return torch.cat(found)[order]

    def run_columns(self, batch: BranchBatch, noise: StoredNoise) -> tuple[Tensor, list[Tensor]]:
        """See ``DraftExecution.run_columns``."""
        tables = self._tables_of(batch)
        self._parts, self._parts_slots_B = [(torch.arange(1), tables)], batch.slots_B
        return tables.run_columns(self._graphs.tables[batch.tokens_BN.shape[1]], batch, noise)

    def append_proposal(
        self,
        slots_B: Tensor,
        num_entries_B: Tensor,
        trunk_lengths_B: Tensor,
        block_tables_BJ: Tensor,
    ) -> None:
        """See ``DraftExecution.append_proposal``."""
        # A trunk that is shorter than the copy is that of another session in the same slot.
        for slot, length in zip(slots_B.tolist(), trunk_lengths_B.tolist(), strict=True):
            for slots, tables in list(self._tables.items()):
                if slot in slots and tables.num_read_B[slots.index(slot)] > length:
                    del self._tables[slots]
        self._storage.append_proposal(slots_B, num_entries_B, trunk_lengths_B, block_tables_BJ)

    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> None:
        """See ``DraftExecution.promote_branches``."""
        self._storage.promote_branches(slots_B, branches_B)

    def _tables_of(self, batch: BranchBatch) -> Tables:
        """Return tables for a batch that begins, or that has lost sessions."""
        slots = tuple(batch.slots_B.tolist())
        tables = self._tables.get(slots)
        if tables is None or not tables.precedes(batch):
            tables = Tables(self._storage, self._model, batch)
            others = {key: each for key, each in self._tables.items() if not {*key} & {*slots}}
            self._tables = {slots: tables, **others}
        tables.begin(batch)
        return tables

    def _causal_inputs(
        self, tables_BJ: Tensor, lengths_B: Tensor, rows: int, *, needs_logits: bool = True
    ) -> PassInputs:
        """Read the trunks for new rows that see all of them, and each other up to themselves."""
        trunk_BS, in_trunk_BS = self._entries.trunk(tables_BJ, lengths_B)
        missing = whole_width(max(1, trunk_BS.shape[1])) - trunk_BS.shape[1]
        seen_BQS = pad(in_trunk_BS, (0, missing))[:, None].expand(-1, rows, -1)
        stored_XBGSE = self._storage.select(pad(trunk_BS, (0, missing)))
        heads, size = self._storage.shape_GE
        own_XBGQOE = torch.zeros((len(stored_XBGSE), 1, heads, 1, 1, size))
        return PassInputs(
            stored_XBGSE.contiguous(),
            mask_of(seen_BQS, self._group),
            own_XBGQOE,
            mask_of(torch.ones((1, rows, rows), dtype=torch.bool).tril(), self._group),
            needs_logits=needs_logits,
        )

    def _store(self, entries_BQ: Tensor) -> None:
        """Write the entries of a causal pass to the storage."""
        self._storage.put(entries_BQ, self._graphs.causal.new_entries(2 * self._model.num_layers))


def mask_of(seen_BQS: Tensor, group: int) -> Tensor:
    """Return the additive mask of all heads of a group, [B, 1, U, S]."""
    mask_BQS = torch.zeros(seen_BQS.shape).masked_fill_(~seen_BQS, -torch.inf)
    return mask_BQS.repeat_interleave(group, dim=1)[:, None]


def group_by_width(trunk_lengths_B: Tensor) -> list[Tensor]:
    """Return the rows of sessions that share a pass; one group unless padding takes too long."""
    widths = [whole_width(max(1, length)) for length in trunk_lengths_B.tolist()]
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
