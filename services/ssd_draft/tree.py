"""The tree of branches: up to K+1 lock-step passes over N outcomes of each session.

The tree calls a runner and contains no model code. Letter: X session slots of the process. With n
committed tokens, branch j of outcome (k_j, t_j) chooses in step s the token at position
n + k_j + s + 1, with the noise of that position. Tables may end after any step.

*Decision*: the logits of every branch are kept where the engine wrote them, and forks are ranked
for the winning branch only. *Because*: a step needs one token per row, and only 1 of N branches is
ever ranked; ranking all rows took 40 % of a step at 8 sessions (1.7 of 4.6 ms; V = 4,096). *Not
chosen*: keeping hidden states and running the head again, which delays the next table. *Revisit
when* N x (K+1) x V logits of a session are large compared with its KV entries.

*Decision*: on a device, the host waits for each column one step after it was chosen, in a copy with
an event. *Because*: the next step is queued by then, so the device does not wait for the host, and
the host is at most one step ahead. A commit can then end the tree at the next step boundary, and
each column can be sent after its step. *Not chosen*: no wait inside a tree. The host would queue
all K+1 steps at once: a commit that ends the tree would wait for them, up to a whole tree.
*Revisit when* a profile on a GPU shows that the device waits between steps.
"""

from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import AppendBatch, BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.config import STATIC, EngineConfig
from ssd.engine.execution import TreeRunner
from ssd.engine.precision import DTYPES
from ssd.engine.sampling.keyed import to_device
from ssd.speculation.fan_out import Candidates, FanOutPolicy, SelectedOutcomes
from ssd.speculation.fan_out_fit import Rounds
from ssd.types import NO_TOKEN, OpenSession
from ssd_draft.sessions import Move
from ssd_draft.table_build import ChosenColumn, Steps, TableBuild
from ssd_draft.token_choice import TokenChoice

MIN_CANDIDATES = 16
"""Minimum number of candidates that are kept at a position, besides the proposed token."""
Ints = NDArray[np.int64]


def num_candidates(engine: EngineConfig, num_token_ids: int) -> int:
    """Return the candidates kept at each position (M); one position can supply a whole table."""
    return min(max(MIN_CANDIDATES, engine.branches) + 1, num_token_ids)


def num_noise_rows(engine: EngineConfig) -> int:
    """Return the rows of the noise ring: 2K+2 of a tree, and K+1 that are filled while waiting."""
    return 3 * engine.lookahead + 3


class Tree:
    """KV lengths, proposals, candidates and noise of all sessions, by slot. Step thread only."""

    def __init__(
        self, runner: TreeRunner, choice: TokenChoice, engine: EngineConfig, num_token_ids: int
    ) -> None:
        """Construct; ids from ``num_token_ids`` on are padding of the embedding."""
        self.engine = engine
        self._runner = runner
        self._choice = choice
        self._device = engine.device
        # A device runs the next step while the host reads the column of the last one.
        self._lag = 1 if engine.engine == STATIC else 0
        self._num_candidates = num_candidates(engine, num_token_ids)
        x, p, m = engine.max_num_seqs, engine.num_columns, self._num_candidates
        self._trunk_lengths_X = np.zeros(x, dtype=np.int64)
        self._block_tables_XJ = np.zeros((x, engine.blocks_per_sequence), dtype=np.int64)
        self._proposals_XK = np.full((x, engine.lookahead), -1, dtype=np.int64)
        self._num_proposed_X = np.zeros(x, dtype=np.int64)
        self._temperatures_X = np.zeros(x, dtype=np.float32)
        self._newest: dict[int, tuple[Steps, int]] = {}
        """By slot, the steps of the newest table and its row in the batch."""
        self._ids_XPM = np.zeros((x, p, m), dtype=np.int64)
        self.is_broken_X = np.zeros(x, dtype=np.bool_)
        """Slots for which the model computed NaN or infinity; their tables are invalid."""
        self._scores_XPM = np.full((x, p, m), -np.inf, dtype=np.float32)

    def open(self, slot: int, blocks: Rows[int], opening: OpenSession, num_stored: int = 0) -> None:
        """Initialise the slot of a session with its blocks, noise and filters.

        The first blocks have the first ``num_stored`` tokens; the others are stored later.
        """
        temperature = opening.temperature
        self.place(slot, blocks, num_stored)
        self._newest.pop(slot, None)
        self.is_broken_X[slot] = False
        self._temperatures_X[slot] = temperature
        self._choice.assign(slot, opening.seed, opening.choice, temperature)
        self._choice.filters.assign(slot, temperature, opening.top_k, opening.min_p)

    def place(self, slot: int, blocks: Rows[int], num_stored: int) -> None:
        """Set the blocks of a session, with so many stored tokens in the first ones."""
        self._trunk_lengths_X[slot] = num_stored
        self._block_tables_XJ[slot] = 0
        self._block_tables_XJ[slot, : len(blocks)] = blocks

    def num_stored(self, slot: int) -> int:
        """Return the number of tokens in the trunk of a session."""
        return int(self._trunk_lengths_X[slot])

    def close(self, slot: int) -> None:
        """Release the slot of a session."""
        self._runner.end_session(slot)
        # The logits of a batch stay in memory until no slot refers to them.
        self._newest.pop(slot, None)
        self.is_broken_X[slot] = False
        self._choice.release(slot)

    def store(self, slot: int, first: int, tokens: Rows[int]) -> None:
        """Store prompt tokens from position ``first`` on, within one chunk."""
        tokens_1P = torch.zeros((1, self.engine.prefill_chunk), dtype=torch.int64)
        tokens_1P[0, : len(tokens)] = torch.tensor([*tokens])
        bad_column = self._runner.prefill(
            PagedBatch(
                tokens_1P,
                torch.tensor([first]),
                torch.tensor([len(tokens)]),
                torch.from_numpy(self._block_tables_XJ[slot : slot + 1]),
            )
        )
        self.is_broken_X[slot] |= bad_column is not None
        self._trunk_lengths_X[slot] = first + len(tokens)

    def start(self, slot: int, newest: int, proposal: tuple[int, ...]) -> None:
        """Run the first pass over the newest token and the proposal after it."""
        self._propose(np.array([slot]), [Move(0, newest, proposal)])

    def advance(self, slots: Rows[int], moves: Rows[Move]) -> None:
        """Apply one move to each session.

        A winning branch whose proposal has been run becomes the proposal segment as it is. A pass
        over the newest token and the proposal fills the segments of the other sessions.
        """
        slots_B = np.array(slots)
        self._append(slots_B, np.array([move.num_entries for move in moves]))
        self._store_skipped(slots_B, [move.skipped for move in moves])
        self._propose(slots_B, moves)

    def rounds_of(self, slots: Rows[int], moves: Rows[Move]) -> Rounds:
        """Return the rounds that the moves end; called before ``advance``."""
        return Rounds(
            self._ids_XPM[slots],
            self._scores_XPM[slots],
            self._temperatures_X[slots],
            self._proposals_XK[slots],
            self._num_proposed_X[slots],
            np.array([move.num_entries - 1 for move in moves]),
            # Of moves that are applied together, the first one ends the round.
            np.array([(*move.skipped, move.bonus)[0] for move in moves]),
        )

    def select_outcomes(self, slots: Rows[int], policy: FanOutPolicy) -> SelectedOutcomes:
        """Select the N outcomes of the next table of each session."""
        return policy.choose(
            Candidates(self._ids_XPM[slots], self._scores_XPM[slots], self._temperatures_X[slots]),
            self._proposals_XK[slots],
            self._num_proposed_X[slots],
            self.engine.branches,
        )

    def table_lengths(self, num_sessions: int, wanted: int) -> Rows[int]:
        """Return how many columns the tables of a batch can have, ascending.

        ``wanted`` is the number of columns that the target uses, 1..K.
        """
        lengths = sorted({length for _, length in self._runner.whole_tables})
        if num_sessions > 1 or not lengths:
            return [wanted]
        # The last length is the first with as many columns as wanted.
        return lengths[: 1 + sum(length < wanted for length in lengths)]

    def begin_tables(self, slots: Rows[int], outcomes: SelectedOutcomes, length: int) -> TableBuild:
        """Begin a table of each session for these outcomes; ``run_step`` decodes after them."""
        slots_B = np.array(slots)
        lengths_B = self._trunk_lengths_X[slots_B]
        self._fill(slots_B, lengths_B + 1)
        shape_BNK = (*outcomes.bonus_BN.shape, self.engine.lookahead)
        accepted_BN = np.maximum(outcomes.accepted_BN, 0).astype(np.int64)
        bonus_BN = np.maximum(outcomes.bonus_BN, 0).astype(np.int64)
        build = TableBuild(
            outcomes=outcomes,
            tables_BNK=np.full(shape_BNK, NO_TOKEN, dtype=np.int32),
            rows_B=np.arange(len(slots)),
            batch=BranchBatch(
                slots_B=torch.from_numpy(slots_B),
                tokens_BN=to_device(torch.from_numpy(bonus_BN), self._device),
                accepted_BN=torch.from_numpy(accepted_BN),
                step=0,
                trunk_lengths_B=torch.from_numpy(lengths_B),
                block_tables_BJ=torch.from_numpy(self._block_tables_XJ[slots_B]),
            ),
            slots_R=np.repeat(slots, accepted_BN.shape[1]),
            positions_R=(lengths_B[:, None] + 2 + accepted_BN).reshape(-1),
            length=length,
        )
        self._newest |= {slot: (build.steps, row) for row, slot in enumerate(slots)}
        return build

    def run_step(self, build: TableBuild) -> None:
        """Run the next step of a batch of tables; each step but the last one chooses a column.

        On a device, a column can be read one step after it was chosen.
        """
        step, branches = build.batch.step, build.branches
        logits_BNV = self._runner.run_branches(build.batch)
        kept_BNV = logits_BNV.to(DTYPES[self.engine.dtype])
        build.steps.append((build.rows_B, kept_BNV[None]))
        if step == build.length:
            self._read(build, 0)
            return
        chosen_BN = self._choice.choose(
            logits_BNV.flatten(0, 1), build.slots_R, build.positions_R + step
        ).view(-1, branches)
        slots_B = build.batch.slots_B.numpy()
        build.unread.append(ChosenColumn(build.rows_B, slots_B, step, chosen_BN))
        build.batch = replace(build.batch, tokens_BN=chosen_BN.clamp_min(0), step=step + 1)
        self._read(build, self._lag)

    def can_run_whole(self, build: TableBuild) -> bool:
        """Return whether ``run_whole`` is possible for a new build."""
        is_alone = len(build.rows_B) == 1
        return is_alone and (build.branches, build.length) in self._runner.whole_tables

    def run_whole(self, build: TableBuild) -> None:
        """Run all steps of a new build of one table in one pass.

        With the length K of the build, the pass returns the tokens of its columns, [K, B, N] with
        B = 1, and the logits of its steps, [K + 1, B, N, V].
        """
        positions_KR = build.positions_R + np.arange(build.length)[:, None]
        noise = self._choice.stored_noise(build.slots_R, positions_KR)
        assert noise is not None, "a pass over all columns needs stored noise"
        tokens_KBN, logits_PBNV = self._runner.run_columns(build.batch, noise)
        build.steps.append((build.rows_B, logits_PBNV))
        chosen_KBN = tokens_KBN.numpy()
        build.tables_BNK[build.rows_B, :, : build.length] = chosen_KBN.transpose(1, 2, 0)
        self.is_broken_X[build.batch.slots_B.numpy()] |= bool((chosen_KBN == NO_TOKEN).any())
        build.depth = build.length

    def _read(self, build: TableBuild, num_left: int) -> None:
        """Put chosen columns, [B, N] tokens each, into the tables, except the newest ones."""
        while len(build.unread) > num_left:
            column = build.unread.popleft()
            chosen_BN = column.wait()
            build.tables_BNK[column.rows_B, :, column.step] = chosen_BN
            is_broken_B = (chosen_BN == NO_TOKEN).any(axis=1)
            if is_broken_B.any():
                # A slot whose session has ended may have another session by now.
                is_broken_B &= np.isin(column.rows_B, build.rows_B)
                self.is_broken_X[column.slots_B] |= is_broken_B
            build.depth = column.step + 1

    def keep(self, build: TableBuild, rows: Rows[int]) -> None:
        """Keep the tables in some rows of the current batch; the other tables end."""
        build.rows_B = build.rows_B[rows]
        batch, rows_B = build.batch, torch.tensor(rows, dtype=torch.int64)
        build.batch = replace(
            batch,
            slots_B=batch.slots_B[rows],
            tokens_BN=batch.tokens_BN[to_device(rows_B, self._device)],
            accepted_BN=batch.accepted_BN[rows],
            trunk_lengths_B=batch.trunk_lengths_B[rows],
            block_tables_BJ=batch.block_tables_BJ[rows],
        )
        # The steps of the other tables end here.
        build.steps = build.steps.copy()
        for slot, row in zip(build.batch.slots_B.tolist(), build.rows_B.tolist(), strict=True):
            self._newest[slot] = build.steps, row
        build.slots_R, build.positions_R = (
            array_R.reshape(-1, build.branches)[rows].reshape(-1)
            for array_R in (build.slots_R, build.positions_R)
        )

    def fill_ahead(self) -> bool:
        """Compute noise of a later table; returns False if none is missing.

        Called while waiting. A commit advances a session by at most K+1 tokens, so K+1 positions
        beyond the current tree are enough.
        """
        committed_X = self._trunk_lengths_X + 1
        return self._choice.fill_ahead(committed_X, 3 * self.engine.lookahead + 2)

    def _fill(self, slots_B: Ints, committed_B: Ints) -> None:
        """Compute the missing noise of trees: 2K+2 positions, from each session's length on."""
        self._choice.fill(slots_B, committed_B, 2 * self.engine.lookahead + 2)

    def _propose(self, slots_B: Ints, moves: Rows[Move]) -> None:
        """Fill the proposal segments with the next proposals, and rank the forks after them.

        Branches of one batch of tables are promoted together; other sessions share one pass.
        """
        branch_B = np.array([-1 if move.branch is None else move.branch for move in moves])
        num_proposed_B = np.array([len(move.proposal) for move in moves])
        newest = [self._newest.pop(slot, ([], 0)) for slot in slots_B.tolist()]
        # Usually, all sessions are of one batch of tables.
        batch_B = np.array([id(steps) for steps, _ in newest])
        num_steps = {
            batch: sum(len(logits) for _, logits in steps)
            for batch, steps in {id(steps): steps for steps, _ in newest}.items()
        }
        num_steps_B = np.array([num_steps[batch] for batch in batch_B.tolist()])
        is_adopted_B = (branch_B >= 0) & (num_proposed_B < num_steps_B)
        tokens_BP = self._padded([(move.bonus, *move.proposal) for move in moves])
        parts = [is_adopted_B & (batch_B == batch) for batch in set(batch_B[is_adopted_B].tolist())]
        for rows in [part_B.nonzero()[0] for part_B in (*parts, ~is_adopted_B)]:
            if not rows.size:
                continue
            some_slots_B, columns_B = slots_B[rows], num_proposed_B[rows] + 1
            if is_adopted_B[rows[0]]:
                rows_B = np.array([newest[row][1] for row in rows])
                logits_BPV = self._promote(some_slots_B, branch_B[rows], newest[rows[0]][0], rows_B)
            else:
                logits_BPV = self._run_proposals(some_slots_B, tokens_BP[rows], columns_B)
            self._rank(some_slots_B, logits_BPV, columns_B)
            self._proposals_XK[some_slots_B] = tokens_BP[rows, 1:]
            self._num_proposed_X[some_slots_B] = num_proposed_B[rows]

    def _append(self, slots_B: Ints, num_entries_B: Ints) -> None:
        """Append the first entries of proposal segments to their trunks."""
        lengths_B, tables_BJ = self._trunk_lengths_X[slots_B], self._block_tables_XJ[slots_B]
        arrays = (slots_B, num_entries_B, lengths_B, tables_BJ)
        self._runner.append_proposal(AppendBatch(*map(torch.from_numpy, arrays)))
        self._trunk_lengths_X[slots_B] += num_entries_B

    def _store_skipped(self, slots_B: Ints, skipped: Rows[tuple[int, ...]]) -> None:
        """Append committed tokens that were never run, in one pass of all sessions.

        More such tokens than a proposal has columns are stored like a prompt.
        """
        rows = []
        for row, tokens in enumerate(skipped):
            if len(tokens) > self.engine.num_columns:
                slot = int(slots_B[row])
                self.store(slot, int(self._trunk_lengths_X[slot]), tokens)
            elif tokens:
                rows.append(row)
        if rows:
            columns_B = np.array([len(skipped[row]) for row in rows])
            tokens_BP = self._padded([skipped[row] for row in rows])
            self._run_proposals(slots_B[rows], tokens_BP, columns_B)
            self._append(slots_B[rows], columns_B)

    def _promote(self, slots_B: Ints, branch_B: Ints, steps: Steps, rows_B: Ints) -> torch.Tensor:
        """Make winning branches of one batch the proposals; return their logits, [B, P, V].

        They have as many columns as all other logits: a choice is compiled for this number.
        """
        self._runner.promote_branches(torch.from_numpy(slots_B), torch.from_numpy(branch_B))
        logits_PBV: list[torch.Tensor] = []
        where: tuple[Any, Any] = (0, 0)
        indexed_B: Ints | None = None
        for step_rows_B, logits_SBNV in steps:
            if step_rows_B is not indexed_B:
                indexed_B = step_rows_B
                index_B = np.searchsorted(step_rows_B, rows_B)
                where = self._where(index_B, branch_B)
            logits_PBV.append(logits_SBNV[:, where[0], where[1]])
        return torch.cat(logits_PBV).transpose(0, 1).float()

    def _where(self, index_B: Ints, branch_B: Ints) -> tuple[Any, Any]:
        """Return the index of a branch of each session in logits.

        For one session, the index is a slice, so the result is a view.
        """
        if len(index_B) == 1:
            return slice(int(index_B[0]), int(index_B[0]) + 1), int(branch_B[0])
        index_2B = to_device(torch.from_numpy(np.stack((index_B, branch_B))), self._device)
        return index_2B[0], index_2B[1]

    def _run_proposals(self, slots_B: Ints, tokens_BP: Ints, columns_B: Ints) -> torch.Tensor:
        """Run one causal pass over some tokens after each trunk; return their logits."""
        arrays = (
            *(slots_B, np.maximum(tokens_BP, 0), columns_B),
            *(self._trunk_lengths_X[slots_B], self._block_tables_XJ[slots_B]),
        )
        return self._runner.run_proposals(ProposalBatch(*map(torch.from_numpy, arrays)))

    def _rank(self, slots_B: Ints, logits_BPV: torch.Tensor, num_columns_B: Ints) -> None:
        """Keep the best candidates of the first columns of each session; trunks are up to date."""
        lengths_B = self._trunk_lengths_X[slots_B]
        self._fill(slots_B, lengths_B + 1)
        row_R, column_R = (np.arange(self.engine.num_columns) < num_columns_B[:, None]).nonzero()
        slots_R = slots_B[row_R]
        logits_RV = logits_BPV.flatten(0, 1)
        if len(row_R) < len(logits_RV):
            where_R = torch.from_numpy(row_R * logits_BPV.shape[1] + column_R)
            logits_RV = logits_RV[to_device(where_R, self._device)]
        ids_RM, scores_RM = self._choice.rank(
            logits_RV, slots_R, lengths_B[row_R] + 1 + column_R, self._num_candidates
        )
        self._ids_XPM[slots_R, column_R] = ids_RM.cpu().numpy()
        self._scores_XPM[slots_R, column_R] = scores_RM.cpu().numpy()
        is_finite_R = np.isfinite(self._scores_XPM[slots_R, column_R, 0])
        self.is_broken_X[slots_R[~is_finite_R]] = True

    def _padded(self, tokens: Rows[tuple[int, ...]]) -> Ints:
        """Return tokens in rows of P columns, padded with -1."""
        tokens_BP = np.full((len(tokens), self.engine.num_columns), NO_TOKEN, dtype=np.int64)
        for row, row_tokens in enumerate(tokens):
            tokens_BP[row, : len(row_tokens)] = row_tokens
        return tokens_BP
