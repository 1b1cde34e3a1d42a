"""A draft's passes with dense attention over stored entries; see ``draft_graph``.

New entries are written to the KV storage. Passes read trunks and proposals from a dense copy, to
which each pass adds what was committed since the one before.

*Decision*: entries are copied with numpy, session by session. *Because*: after a pass, the caches
of a CPU do not have the code of the host, and a call of torch takes three times as long. From a
commit to its table .9 instead of 1.9 ms beside the passes (embedded draft, one session, AVX2).
*Revisit when* drafts have many sessions with small weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from weakref import proxy

import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ssd.engine.attention.context import whole_width
from ssd.engine.batch import AppendBatch, BranchBatch, PagedBatch, ProposalBatch, StoredNoise
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.execution import DraftExecution
from ssd.engine.kv_cache.storage import KVStorage
from ssd.engine.memory import allocate_storage
from ssd.engine.models.weights import DecoderWeights
from ssd.engine.openvino_engine.draft_graph import DraftGraph, DraftGraphs, PassInputs
from ssd.engine.openvino_engine.table_graph import TableGraph

ROW_STEP = 16
"""Chunks of a prompt are padded to multiples, since products compile a kernel for each shape."""
MOST_WARM_ROWS = 128
"""Chunks of more rows are not warmed up, but for complete ones: their kernels take a small share of
their time."""
MOST_USED = 0.6
"""Sessions of different widths run in several passes if these have at most this share of the
entries of one padded pass. Each pass reads the weights."""


SEEN, HIDDEN = np.float32(0.0), np.float32(-np.inf)
"""Values of additive masks."""
Floats = NDArray[np.float32]


class HostEntries:
    """The entries of a storage in memory of the host, for one session at a time."""

    def __init__(self, storage: KVStorage) -> None:
        self._map = storage.entries
        self._entries_XZGE: Floats = storage.entries_XZGE.numpy()

    def trunk(self, blocks_J: NDArray[np.int64], first: int, last: int) -> Floats:
        """Return the entries of some positions, a copy, [X, G, S, E]."""
        return self._entries_XZGE[:, self._at(blocks_J, first, last)].transpose(0, 2, 1, 3)

    def proposal(self, slot: int) -> Floats:
        """Return the proposal segment of a session, a view, [X, G, P, E]."""
        first = self._map.first_proposal(slot)
        entries_XPGE = self._entries_XZGE[:, first : first + self._map.num_columns]
        return entries_XPGE.transpose(0, 2, 1, 3)

    def append_proposal(
        self, slot: int, count: int, blocks_J: NDArray[np.int64], length: int
    ) -> None:
        """Copy the first entries of a proposal segment to the end of its trunk."""
        first = self._map.first_proposal(slot)
        where = self._at(blocks_J, length, length + count)
        self._entries_XZGE[:, where] = self._entries_XZGE[:, first : first + count]

    def _at(self, blocks_J: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
        block_S, offset_S = np.divmod(np.arange(first, last), self._map.block_size)
        entries_S: NDArray[np.int64] = blocks_J[block_S] * self._map.block_size + offset_S
        return entries_S


class Trunks:
    """A dense copy of the stored entries of some sessions: proposals, then trunks.

    It has the arrays of their passes, which refer to it weakly: all are freed with it, at once.
    """

    def __init__(self, storage: KVStorage, slots_B: Tensor, lengths_B: Tensor) -> None:
        """Allocate, without entries."""
        self._stored = HostEntries(storage)
        self._slots = slots_B.tolist()
        self.columns = storage.entries.num_columns
        """P, in front of each trunk."""
        self.width = whole_width(self.columns + int(lengths_B.max()))
        """S."""
        self.num_read_B = [0] * len(slots_B)
        """Entries of each trunk that are in the copy."""
        shape_BGSE = (len(slots_B), storage.shape_GE[0], self.width, storage.shape_GE[1])
        self.entries_XBGSE = torch.zeros((2 * len(storage.keys), *shape_BGSE))
        self._entries_XBGSE: Floats = self.entries_XBGSE.numpy()
        self.logits_PRV = torch.empty(0)
        """Logits of the newest table; ``Tables`` of any number of branches share it."""
        self.tables: dict[int, Tables] = {}
        """The newest tables by branches."""
        self.explicit: dict[int, ExplicitRows] = {}
        """Explicit rows by their number."""

    def precedes(self, lengths_B: Tensor) -> bool:
        """Return whether the copy has the shape for trunks of these lengths, and no later entry."""
        lengths = lengths_B.tolist()
        return whole_width(self.columns + max(lengths)) == self.width and all(
            now >= read for now, read in zip(lengths, self.num_read_B, strict=True)
        )

    def read(self, block_tables_BJ: Tensor, lengths_B: Tensor) -> None:
        """Read the new entries of the trunks."""
        tables_BJ = block_tables_BJ.numpy()
        for row, length in enumerate(lengths_B.tolist()):
            first = self.num_read_B[row]
            where = slice(self.columns + first, self.columns + length)
            new_XGSE = self._stored.trunk(tables_BJ[row], first, length)
            self._entries_XBGSE[:, row, :, where] = new_XGSE
            self.num_read_B[row] = length

    def read_proposals(self) -> None:
        """Read the proposals."""
        for row, slot in enumerate(self._slots):
            self._entries_XBGSE[:, row, :, : self.columns] = self._stored.proposal(slot)

    def show(self, mask_B1US: Floats, num_shown_B: list[int]) -> None:
        """Unmask the entries of the trunks after those that are shown already."""
        for row, length in enumerate(self.num_read_B):
            mask_B1US[row, ..., self.columns + num_shown_B[row] : self.columns + length] = 0.0
            num_shown_B[row] = length


class ExplicitRows:
    """The inputs and the output of a causal pass over explicit tokens after each trunk."""

    def __init__(self, trunks: Trunks, model: ModelConfig, rows: int) -> None:
        """Allocate; no entry is visible."""
        sessions = len(trunks.num_read_B)
        group = model.num_heads // model.num_kv_heads
        self._trunks = proxy(trunks)
        self._num_shown_B = [0] * sessions
        self._mask_B1US = torch.full((sessions, 1, rows * group, trunks.width), -torch.inf)
        self.inputs = PassInputs(
            trunks.entries_XBGSE,
            self._mask_B1US,
            no_own_entries(trunks.entries_XBGSE),
            mask_of(torch.ones((1, rows, rows), dtype=torch.bool).tril(), group),
        )
        logits_RV = np.empty((sessions * rows, model.vocab_size), dtype=np.float32)
        self.output = openvino.Tensor(logits_RV, shared_memory=True)

    def begin(self) -> None:
        """Make the trunks visible."""
        self._trunks.show(self._mask_B1US.numpy(), self._num_shown_B)


class Tables:
    """Entries and logits of tables that are built together, in the form of the graph."""

    def __init__(
        self, trunks: Trunks, storage: KVStorage, model: ModelConfig, branches: int
    ) -> None:
        """Allocate, without entries."""
        sessions, self._branches = len(trunks.num_read_B), branches
        self._trunks = proxy(trunks)
        self._storage = storage
        self._columns = trunks.columns
        self._group = model.num_heads // model.num_kv_heads
        self._num_shown_B = [0] * sessions
        shape_XBGNPE = (
            *(2 * model.num_layers, sessions, model.num_kv_heads),
            *(branches, self._columns, model.head_size),
        )
        self._own_XBGNPE = torch.zeros(shape_XBGNPE)
        self._own_BPN = self._first_BN = torch.empty(0)
        """Own entries in the storage, and the positions of step 0. Set by ``begin_steps``."""
        num_queries = branches * self._group
        self._mask_B1US = torch.full((sessions, 1, num_queries, trunks.width), -torch.inf)
        self._mask_of_proposals_BUP: Floats = self._mask_B1US.numpy()[:, 0, :, : self._columns]
        self._column_P = np.arange(self._columns)
        same_1NN = torch.eye(branches, dtype=torch.bool)[None]
        self._inputs = PassInputs(
            trunks.entries_XBGSE, self._mask_B1US, self._own_XBGNPE, mask_of(same_1NN, self._group)
        )
        most, rows = storage.entries.branches, sessions * branches
        if not trunks.logits_PRV.numel():
            trunks.logits_PRV = torch.empty((self._columns, sessions * most, model.vocab_size))
        self._logits_PRV = trunks.logits_PRV[:, :rows]
        self._outputs = [
            openvino.Tensor(logits_RV.numpy(), shared_memory=True) for logits_RV in self._logits_PRV
        ]
        self._whole: dict[int, tuple[Floats, Sequence[openvino.Tensor]]] = {}
        """By the columns of whole tables of one session, own entries and outputs."""

    def begin(self, batch: BranchBatch) -> None:
        """Read proposals, and new entries of the trunks."""
        is_seen_BNP = self._column_P <= batch.accepted_BN.numpy()[:, :, None]
        mask_BNP = np.where(is_seen_BNP, SEEN, HIDDEN)
        self._mask_of_proposals_BUP[:] = mask_BNP.repeat(self._group, axis=1)
        self._trunks.read(batch.block_tables_BJ, batch.trunk_lengths_B)
        self._trunks.read_proposals()
        self._trunks.show(self._mask_B1US.numpy(), self._num_shown_B)

    def begin_steps(self, batch: BranchBatch) -> None:
        """Begin, and read the own entries of the steps before."""
        self.begin(batch)
        self._first_BN = batch.trunk_lengths_B[:, None] + 1 + batch.accepted_BN
        self._inputs.own_mask_O[:] = -torch.inf
        self._own_BPN = self._storage.entries.own(batch.slots_B, self._branches)
        for step in range(batch.step):
            self._add_own(step, self._storage.select(self._own_BPN[:, step]))

    def run(self, graph: DraftGraph, batch: BranchBatch) -> Tensor:
        """Run a step; returns logits [B, N, V], valid until the next table."""
        positions_BN = self._first_BN + batch.step
        graph.run(self._inputs, batch.tokens_BN, positions_BN, self._outputs[batch.step])
        new_XBGNE = graph.new_entries(len(self._own_XBGNPE))
        self._storage.put(self._own_BPN[:, batch.step], new_XBGNE)
        self._add_own(batch.step, new_XBGNE)
        return self._logits_PRV[batch.step].view(*batch.tokens_BN.shape, -1)

    def run_columns(
        self, graph: TableGraph, batch: BranchBatch, noise: StoredNoise
    ) -> tuple[Tensor, Tensor, Floats]:
        """Run all steps; see ``TreePasses.run_columns``.

        Returns:
            What ``TreePasses.run_columns`` returns, and the own entries, [X, G, N, P, E], which are
            stored nowhere else and can be NaN or infinity.
        """
        length = len(noise.rows_KR)
        if length not in self._whole:
            entries_XGNPE = np.zeros_like(self._own_XBGNPE.numpy()[:, 0, :, :, : length + 1])
            entries = openvino.Tensor(entries_XGNPE, shared_memory=True)
            self._whole[length] = entries_XGNPE, (entries, *self._outputs[: length + 1])
        entries_XGNPE, outputs = self._whole[length]
        tokens_KN = graph.run(self._inputs.tensors, outputs, batch, noise)
        return tokens_KN[:, None], self._logits_PRV[: length + 1, None], entries_XGNPE

    def _add_own(self, step: int, own_XBGNE: Tensor) -> None:
        self._own_XBGNPE[..., step, :] = own_XBGNE
        self._inputs.own_mask_O[step] = 0.0


class OpenVinoDraft(DraftExecution):
    """Graphs and a KV storage."""

    def __init__(self, weights: DecoderWeights, model: ModelConfig, engine: EngineConfig) -> None:
        self.attention_name = "openvino"
        self._model = model
        self._group = model.num_heads // model.num_kv_heads
        self._graphs = DraftGraphs(weights, model, engine)
        self.whole_tables = self._graphs.tables.keys()
        longest = min(engine.prefill_chunk, MOST_WARM_ROWS)
        self.chunk_sizes = (*range(ROW_STEP, longest, ROW_STEP), engine.prefill_chunk)
        num_unpacked = self._graphs.weights.num_unpacked_bytes
        self._storage = allocate_storage(model, engine, reserved_bytes=num_unpacked)
        self._entries = self._storage.entries
        self._stored = HostEntries(self._storage)
        self.num_blocks = self._entries.num_blocks
        self._trunks: dict[tuple[int, ...], Trunks] = {}
        """Copies, by the slots of their sessions. A session is in one of them at most."""
        self._parts: list[tuple[Tensor, Tables]] = []
        """Rows and tables of the newest step."""
        self._parts_slots_B: Tensor | None = None
        self._whole: dict[int, Floats] = {}
        """By slot, the own entries of its newest table if that was whole, [X, G, N, P, E]; until
        one of its branches is promoted."""

    def free_weights(self) -> None:
        """See ``Execution.free_weights``."""
        self._graphs.weights.free_pages()

    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        first, count = int(batch.first_positions_B[0]), int(batch.num_columns_B[0])
        rows = max(1, -(-count // ROW_STEP)) * ROW_STEP
        column_Q = torch.arange(rows)
        missing = max(0, rows - batch.tokens_BP.shape[1])
        tokens_BQ = pad(batch.tokens_BP[:, :rows], (0, missing))
        last = batch.block_tables_BJ.shape[1] * self._entries.block_size - 1
        position_BQ = (first + column_Q)[None].clamp(max=last)
        inputs = self._causal_inputs(
            batch.block_tables_BJ, batch.first_positions_B, rows, needs_logits=False
        )
        self._graphs.causal.run(inputs, tokens_BQ, position_BQ)
        self._storage.put(
            self._entries.at(batch.block_tables_BJ, position_BQ).where(column_Q < count, 0),
            self._graphs.causal.new_entries(2 * self._model.num_layers),
        )
        return self._graphs.causal.is_finite()

    def end_session(self, slot: int) -> None:
        """See ``TreePasses.end_session``."""
        self._trunks = {key: copy for key, copy in self._trunks.items() if slot not in key}
        self._whole.pop(slot, None)
        if self._parts_slots_B is not None and slot in self._parts_slots_B:
            self._parts, self._parts_slots_B = [], None

    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """See ``TreePasses.run_proposals``."""
        sessions, columns = batch.tokens_BP.shape
        rows = columns if (batch.num_columns_B > 1).any() else 1
        tokens_BQ, column_Q = batch.tokens_BP[:, :rows], torch.arange(rows)
        positions_BQ = batch.trunk_lengths_B[:, None] + column_Q
        explicit = self._explicit_rows(batch, rows)
        if explicit is not None:
            graph = self._graphs.explicit(sessions, rows)
            graph.run(explicit.inputs, tokens_BQ, positions_BQ, explicit.output)
        else:
            graph = self._graphs.causal
            tables_BJ, lengths_B = batch.block_tables_BJ, batch.trunk_lengths_B
            graph.run(self._causal_inputs(tables_BJ, lengths_B, rows), tokens_BQ, positions_BQ)
        is_real_BQ = column_Q < batch.num_columns_B[:, None]
        entries_BQ = self._entries.proposal(batch.slots_B)[:, :rows].where(is_real_BQ, 0)
        self._storage.put(entries_BQ, graph.new_entries(2 * self._model.num_layers))
        return graph.logits().view(sessions, rows, -1)

    def run_branches(self, batch: BranchBatch) -> Tensor:
        """See ``TreePasses.run_branches``.

        Sessions with much shorter trunks than others run in a pass of their own.
        """
        if batch.step == 0 or batch.slots_B is not self._parts_slots_B:
            for slot in batch.slots_B.tolist():
                self._whole.pop(slot, None)
            self._parts = [
                (rows, self._tables_of(_rows_of(batch, rows)))
                for rows in group_by_width(batch.trunk_lengths_B)
            ]
            for rows, tables in self._parts:
                tables.begin_steps(_rows_of(batch, rows))
            self._parts_slots_B = batch.slots_B
        sessions, branches = batch.tokens_BN.shape
        if len(self._parts) == 1:
            graph = self._graphs.branching(sessions, branches)
            return self._parts[0][1].run(graph, batch)
        logits = [
            tables.run(self._graphs.branching(len(rows), branches), _rows_of(batch, rows))
            for rows, tables in self._parts
        ]
        order = torch.cat([rows for rows, _ in self._parts]).argsort()
        return torch.cat(logits)[order]

    def run_columns(self, batch: BranchBatch, noise: StoredNoise) -> tuple[Tensor, Tensor]:
        """See ``TreePasses.run_columns``."""
        tables = self._tables_of(batch)
        tables.begin(batch)
        graph = self._graphs.tables[batch.tokens_BN.shape[1], len(noise.rows_KR)]
        tokens_K1N, logits_P1NV, entries_XGNPE = tables.run_columns(graph, batch, noise)
        self._whole[int(batch.slots_B)] = entries_XGNPE
        return tokens_K1N, logits_P1NV

    def append_proposal(self, batch: AppendBatch) -> None:
        """See ``TreePasses.append_proposal``."""
        slots, counts, lengths = (numbers_B.tolist() for numbers_B in batch[:3])
        tables_BJ = batch.block_tables_BJ.numpy()
        for slot, count, length, blocks_J in zip(slots, counts, lengths, tables_BJ, strict=True):
            self._stored.append_proposal(slot, count, blocks_J, length)

    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> None:
        """See ``TreePasses.promote_branches``. A whole table stores no other branch."""
        stored = []
        for row, (slot, branch) in enumerate(
            zip(slots_B.tolist(), branches_B.tolist(), strict=True)
        ):
            if slot not in self._whole:
                stored.append(row)
                continue
            entries_XGPE = self._whole.pop(slot)[:, :, branch]
            if not np.isfinite(entries_XGPE).all():
                entries_XGPE = np.nan_to_num(entries_XGPE, nan=0.0, posinf=0.0, neginf=0.0)
            self._stored.proposal(slot)[:, :, : entries_XGPE.shape[2]] = entries_XGPE
        if stored:
            self._storage.promote_branches(slots_B[stored], branches_B[stored])

    def _tables_of(self, batch: BranchBatch) -> Tables:
        """Return tables for a batch that begins, or that has lost sessions."""
        trunks = self._trunks_of(batch.slots_B, batch.trunk_lengths_B)
        branches = batch.tokens_BN.shape[1]
        if branches not in trunks.tables:
            trunks.tables[branches] = Tables(trunks, self._storage, self._model, branches)
        return trunks.tables[branches]

    def _trunks_of(self, slots_B: Tensor, lengths_B: Tensor) -> Trunks:
        slots = tuple(slots_B.tolist())
        trunks = self._trunks.get(slots)
        if trunks is None or not trunks.precedes(lengths_B):
            trunks = Trunks(self._storage, slots_B, lengths_B)
            others = {key: copy for key, copy in self._trunks.items() if not {*key} & {*slots}}
            self._trunks = {slots: trunks, **others}
        return trunks

    def _explicit_rows(self, batch: ProposalBatch, rows: int) -> ExplicitRows | None:
        """Return rows after the copy of the trunks; None if other copies would be dropped."""
        slots = tuple(batch.slots_B.tolist())
        if any({*key} & {*slots} for key in self._trunks if key != slots):
            return None
        trunks = self._trunks_of(batch.slots_B, batch.trunk_lengths_B)
        trunks.read(batch.block_tables_BJ, batch.trunk_lengths_B)
        if rows not in trunks.explicit:
            trunks.explicit[rows] = ExplicitRows(trunks, self._model, rows)
        trunks.explicit[rows].begin()
        return trunks.explicit[rows]

    def _causal_inputs(
        self, tables_BJ: Tensor, lengths_B: Tensor, rows: int, *, needs_logits: bool = True
    ) -> PassInputs:
        """Read the trunks for new rows that see all of them, and each other up to themselves."""
        trunk_BS, in_trunk_BS = self._entries.trunk(tables_BJ, lengths_B)
        missing = whole_width(max(1, trunk_BS.shape[1])) - trunk_BS.shape[1]
        seen_BQS = pad(in_trunk_BS, (0, missing))[:, None].expand(-1, rows, -1)
        stored_XBGSE = self._storage.select(pad(trunk_BS, (0, missing)))
        return PassInputs(
            stored_XBGSE.contiguous(),
            mask_of(seen_BQS, self._group),
            no_own_entries(stored_XBGSE),
            mask_of(torch.ones((1, rows, rows), dtype=torch.bool).tril(), self._group),
            needs_logits=needs_logits,
        )


def no_own_entries(stored_XBGSE: Tensor) -> Tensor:
    """Return one own entry for all rows, [X, 1, G, 1, 1, E]; ``PassInputs`` masks it."""
    kinds, _, heads, _, size = stored_XBGSE.shape
    return torch.zeros((kinds, 1, heads, 1, 1, size))


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
