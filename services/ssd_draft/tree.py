"""The tree of branches: K+1 lock-step passes over N outcomes of each session.

The tree calls a runner and contains no model code. Letter: X session slots of the process. With n
committed tokens, branch j of outcome (k_j, t_j) chooses in step s the token at position
n + k_j + s + 1, with the noise of that position.

*Decision*: the logits of every branch are kept in the model's precision, and forks are ranked for
the winning branch only. *Because*: a step needs one token per row, and only 1 of N branches is ever
ranked; ranking all rows took 40 % of a step at 8 sessions (1.7 of 4.6 ms; V = 4,096). *Not chosen*:
keeping hidden states and running the head again, which delays the next table. *Revisit when*
N x (K+1) x V logits of a session are large compared with its KV entries.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.config import DTYPES, EngineConfig
from ssd.engine.sampling.choose import choose, top_candidates
from ssd.speculation.fan_out import Candidates, FanOutPolicy, SelectedOutcomes
from ssd.speculation.noise import NoiseRing
from ssd.types import NO_TOKEN
from ssd_draft.sessions import Move

MIN_CANDIDATES = 16
"""Minimum number of candidates that are kept at a position, besides the proposed token."""
Ints = NDArray[np.int64]


class TreeRunner(Protocol):
    """The methods of ``DraftRunner`` that the tree uses. Step thread only."""

    def prefill(self, batch: PagedBatch) -> int | None:
        """Store the KV of one chunk of one prompt; returns the first column that is not finite."""
        ...

    def run_proposals(self, batch: ProposalBatch) -> torch.Tensor:
        """Fill proposal segments; returns logits_BPV, float32."""
        ...

    def run_branches(self, batch: BranchBatch) -> torch.Tensor:
        """Run one step of all branches; returns logits_BNV, float32."""
        ...

    def append_proposal(
        self,
        slots_B: torch.Tensor,
        num_entries_B: torch.Tensor,
        trunk_lengths_B: torch.Tensor,
        block_tables_BJ: torch.Tensor,
    ) -> None:
        """Append the first entries of proposal segments to their trunks."""
        ...

    def promote_branches(self, slots_B: torch.Tensor, branches_B: torch.Tensor) -> None:
        """Copy the own entries of branches into the proposal segments."""
        ...


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The sizes of a tree, which are those of its engine."""

    engine: EngineConfig
    vocab_size: int
    """Number of token ids, without the padding of the embedding."""

    @property
    def num_columns(self) -> int:
        """P = K + 1."""
        return self.engine.num_columns

    @property
    def lookahead(self) -> int:
        """K."""
        return self.num_columns - 1

    @property
    def branches(self) -> int:
        """N."""
        return self.engine.branches

    @property
    def num_blocks_each(self) -> int:
        """Number of entries of a block table."""
        return -(-self.engine.max_model_len // self.engine.block_size)

    @property
    def num_candidates(self) -> int:
        """Candidates kept at each position (M); one position can supply a whole table."""
        return min(max(MIN_CANDIDATES, self.branches) + 1, self.vocab_size)

    @property
    def num_noise_rows(self) -> int:
        """Rows of the noise ring: 2K+2 of a tree, and K+1 that are filled while waiting."""
        return 3 * self.lookahead + 3


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session that opens: its slot and blocks on this draft, and the noise of ``OpenSession``."""

    slot: int
    blocks: Rows[int]
    seed: int
    choice: int
    temperature: float


@dataclass(frozen=True, slots=True)
class TableBatch:
    """The tables of some sessions: the outcome of each branch (-1: no branch) and its tokens."""

    accepted_BN: NDArray[np.int32]
    bonus_BN: NDArray[np.int32]
    num_branches_B: Ints
    tokens_BNK: NDArray[np.int32]


class Tree:
    """KV lengths, proposals, candidates and noise of all sessions, by slot. Step thread only."""

    def __init__(self, runner: TreeRunner, ring: NoiseRing, shape: TreeShape) -> None:
        self._runner = runner
        self._ring = ring
        self._shape = shape
        x, p, m = shape.engine.max_num_seqs, shape.num_columns, shape.num_candidates
        self._trunk_lengths_X = torch.zeros(x, dtype=torch.int64)
        self._block_tables_XJ = torch.zeros((x, shape.num_blocks_each), dtype=torch.int64)
        self._temperatures_X = torch.zeros(x)
        self._filled_X = np.zeros(x, dtype=np.int64)
        self._proposals_XK = np.full((x, shape.lookahead), -1, dtype=np.int64)
        self._num_proposed_X = np.zeros(x, dtype=np.int64)
        self._ids_XPM = np.zeros((x, p, m), dtype=np.int64)
        self.is_broken_X = np.zeros(x, dtype=np.bool_)
        """Slots for which the model computed NaN or infinity; their tables are invalid."""
        self._scores_XPM = np.full((x, p, m), -np.inf, dtype=np.float32)
        # Only slots in use touch, and so allocate, their memory.
        shape_XNPV = (x, shape.branches, p, shape.vocab_size)
        self._branch_logits_XNPV = torch.empty(shape_XNPV, dtype=DTYPES[shape.engine.dtype])

    def open(self, session: NewSession) -> None:
        """Initialise the slot of a session; its trunk is empty."""
        slot = session.slot
        self._trunk_lengths_X[slot] = 0
        self._block_tables_XJ[slot] = 0
        self._block_tables_XJ[slot, : len(session.blocks)] = torch.tensor(list(session.blocks))
        self._temperatures_X[slot] = session.temperature
        self._filled_X[slot] = 0
        self.is_broken_X[slot] = False
        self._ring.assign(slot, session.seed, session.choice, session.temperature)

    def close(self, slot: int) -> None:
        """Release the slot of a session."""
        self._temperatures_X[slot] = 0
        self.is_broken_X[slot] = False
        self._ring.release(slot)

    def store(self, slot: int, first: int, tokens: Rows[int]) -> None:
        """Store prompt tokens from position ``first`` on, within one chunk."""
        tokens_1P = torch.zeros((1, self._shape.engine.prefill_chunk), dtype=torch.int64)
        tokens_1P[0, : len(tokens)] = torch.tensor(tokens)
        bad_column = self._runner.prefill(
            PagedBatch(
                tokens_1P,
                torch.tensor([first]),
                torch.tensor([len(tokens)]),
                self._block_tables_XJ[slot : slot + 1],
            )
        )
        self.is_broken_X[slot] |= bad_column is not None
        self._trunk_lengths_X[slot] = first + len(tokens)

    def start(self, slot: int, newest: int, proposal: tuple[int, ...]) -> None:
        """Run the first pass over the newest token and the proposal after it."""
        self._run_proposals([slot], [(newest, *proposal)])

    def advance(self, slots: Rows[int], moves: Rows[Move]) -> None:
        """Apply one commit of each of several sessions."""
        slots_B = torch.tensor(slots)
        entries_B = torch.tensor([move.num_entries for move in moves])
        lengths_B, tables_BJ = self._trunk_lengths_X[slots_B], self._block_tables_XJ[slots_B]
        self._runner.append_proposal(slots_B, entries_B, lengths_B, tables_BJ)
        self._trunk_lengths_X[slots_B] += entries_B
        adopting = [row for row, move in enumerate(moves) if move.branch is not None]
        if adopting:
            self._promote([slots[row] for row in adopting], [moves[row] for row in adopting])
        running = [row for row, move in enumerate(moves) if move.branch is None]
        if running:
            tokens = [(moves[row].bonus, *moves[row].proposal) for row in running]
            self._run_proposals([slots[row] for row in running], tokens)

    def build_tables(
        self,
        slots: Rows[int],
        policies: Rows[FanOutPolicy],
        on_tables: Callable[[TableBatch], None],
    ) -> None:
        """Compute one table of each session: select the outcomes, then decode K tokens after each.

        ``on_tables`` is called before the last pass, which only computes the candidates after the
        last tokens of the tables.
        """
        shape = self._shape
        num_sessions, num_branches = len(slots), shape.branches
        slots_B = torch.tensor(slots)
        outcomes = self._select_outcomes(slots, policies)
        accepted_BN = torch.from_numpy(np.maximum(outcomes.accepted_BN, 0).astype(np.int64))
        tokens_BN = torch.from_numpy(np.maximum(outcomes.bonus_BN, 0).astype(np.int64))
        lengths_B, tables_BJ = self._trunk_lengths_X[slots_B], self._block_tables_XJ[slots_B]
        self._fill(slots, lengths_B + 1)
        slots_R = slots_B.repeat_interleave(num_branches)
        temperatures_R = self._temperatures_X[slots_R]
        first_R = (lengths_B[:, None] + 2 + accepted_BN).flatten()
        chosen_BNK = np.empty((num_sessions, num_branches, shape.lookahead), dtype=np.int32)
        for step in range(shape.num_columns):
            if step == shape.lookahead:
                self.is_broken_X[slots] |= (chosen_BNK == NO_TOKEN).any(axis=(1, 2))
                on_tables(_table_batch(outcomes, chosen_BNK))
            logits_BNV = self._runner.run_branches(
                BranchBatch(slots_B, tokens_BN, accepted_BN, step, lengths_B, tables_BJ)
            )
            for row, slot in enumerate(slots):
                self._branch_logits_XNPV[slot, :, step] = logits_BNV[row, :, : shape.vocab_size]
            if step < shape.lookahead:
                noise_RV = self._ring.rows(slots_R, first_R + step)
                tokens_R = choose(logits_BNV.flatten(0, 1), temperatures_R, noise_RV)
                chosen_BNK[:, :, step] = tokens_R.view(num_sessions, -1).numpy(force=True)
                tokens_BN = tokens_R.view(num_sessions, -1).clamp_min(0)

    def fill_ahead(self) -> bool:
        """Compute the noise of one position of a later table; returns False if none is missing.

        Called while waiting. A commit advances a session by at most K+1 tokens, so K+1 positions
        beyond the current tree are enough.
        """
        committed_X = self._trunk_lengths_X.numpy() + 1
        wanted_X = committed_X + 3 * self._shape.lookahead + 2
        is_short_X = (self._temperatures_X.numpy() > 0) & (self._filled_X < wanted_X)
        is_short_X &= self._filled_X > committed_X
        if not is_short_X.any():
            return False
        slot = int(is_short_X.argmax())
        self._filled_X[slot] += 1
        self._ring.fill(slot, int(self._filled_X[slot]), int(self._filled_X[slot]))
        return True

    def _fill(self, slots: Rows[int], committed_B: torch.Tensor) -> None:
        """Compute the missing noise of trees over these committed tokens."""
        for slot, num_committed in zip(slots, committed_B.tolist(), strict=True):
            last = num_committed + 2 * self._shape.lookahead + 1
            self._ring.fill(slot, num_committed, last)
            self._filled_X[slot] = max(last, self._filled_X[slot])

    def _select_outcomes(self, slots: Rows[int], policies: Rows[FanOutPolicy]) -> SelectedOutcomes:
        """Select the outcomes of each session by its policy; usually all have the same one."""
        if all(policy is policies[0] for policy in policies):
            return self._select(policies[0], slots)
        chosen = [
            self._select(policy, [slot]) for policy, slot in zip(policies, slots, strict=True)
        ]
        return SelectedOutcomes(
            np.concatenate([each.accepted_BN for each in chosen]),
            np.concatenate([each.bonus_BN for each in chosen]),
            np.concatenate([each.num_branches_B for each in chosen]),
        )

    def _select(self, policy: FanOutPolicy, slots: Rows[int]) -> SelectedOutcomes:
        return policy.choose(
            Candidates(self._ids_XPM[slots], self._scores_XPM[slots]),
            self._proposals_XK[slots],
            self._num_proposed_X[slots],
            self._shape.branches,
        )

    def _promote(self, slots: list[int], moves: list[Move]) -> None:
        """Make the winning branches the proposals, without recomputing them."""
        branches = np.array([move.branch for move in moves], dtype=np.int64)
        self._runner.promote_branches(torch.tensor(slots), torch.from_numpy(branches))
        logits_BPV = self._branch_logits_XNPV[slots, branches].float()
        self._rank(slots, logits_BPV, torch.full((len(slots),), self._shape.num_columns))
        self._set_proposals(slots, [move.proposal for move in moves])

    def _run_proposals(self, slots: list[int], rows: list[tuple[int, ...]]) -> None:
        """Run one causal pass over the newest token and the proposal of each session."""
        tokens_BP = torch.zeros((len(rows), self._shape.num_columns), dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens_BP[index, : len(row)] = torch.tensor(row)
        slots_B = torch.tensor(slots)
        lengths_B = self._trunk_lengths_X[slots_B]
        columns_B = torch.tensor([len(row) for row in rows])
        self._fill(slots, lengths_B + 1)
        logits_BPV = self._runner.run_proposals(
            ProposalBatch(slots_B, tokens_BP, columns_B, lengths_B, self._block_tables_XJ[slots_B])
        )
        self._rank(slots, logits_BPV, columns_B)
        self._set_proposals(slots, [row[1:] for row in rows])

    def _rank(
        self, slots: list[int], logits_BPV: torch.Tensor, num_columns_B: torch.Tensor
    ) -> None:
        """Keep the best candidates of the first columns of each session; trunks are up to date."""
        slots_B = torch.tensor(slots)
        is_real_BP = torch.arange(self._shape.num_columns) < num_columns_B[:, None]
        row_R, column_R = is_real_BP.nonzero(as_tuple=True)
        slots_R = slots_B[row_R]
        noise_RV = self._ring.rows(slots_R, self._trunk_lengths_X[slots_R] + 1 + column_R)
        if noise_RV is not None:
            # The kept logits do not contain the padding of the vocabulary.
            noise_RV = noise_RV[:, : logits_BPV.shape[2]]
        ids_RM, scores_RM = top_candidates(
            logits_BPV[row_R, column_R],
            self._temperatures_X[slots_R],
            noise_RV,
            self._shape.num_candidates,
        )
        where = (slots_R.numpy(), column_R.numpy())
        self._ids_XPM[where] = ids_RM.numpy(force=True)
        self._scores_XPM[where] = scores_RM.numpy(force=True)
        is_finite_R = np.isfinite(self._scores_XPM[where][:, 0])
        self.is_broken_X[slots_R.numpy()[~is_finite_R]] = True

    def _set_proposals(self, slots: list[int], proposals: list[tuple[int, ...]]) -> None:
        self._proposals_XK[slots] = -1
        for slot, proposal in zip(slots, proposals, strict=True):
            self._proposals_XK[slot, : len(proposal)] = proposal
            self._num_proposed_X[slot] = len(proposal)


def _table_batch(outcomes: SelectedOutcomes, tokens_BNK: NDArray[np.int32]) -> TableBatch:
    return TableBatch(outcomes.accepted_BN, outcomes.bonus_BN, outcomes.num_branches_B, tokens_BNK)
