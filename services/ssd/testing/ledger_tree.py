"""A draft's runner without a model: it stores token ids in place of KV entries.

Like ``ledger_runner``, for trees: trunk pages, proposal segments and own segments of branches
contain tokens, and the logits are a fixed function of the tokens that attention would read. A wrong
length, segment, branch or copy therefore changes the logits.
"""

import torch

from ssd.engine.batch import AppendBatch, BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.execution import TreeRunner
from ssd.testing.ledger_runner import law

_UNWRITTEN = -1


class LedgerTreeRunner(TreeRunner):
    """The part of ``DraftRunner`` that a draft's tree uses. One thread.

    Letter: X session slots.
    """

    def __init__(
        self, *, num_slots: int, num_branches: int, lookahead: int, num_blocks: int, vocab_size: int
    ) -> None:
        self.block_size = 4
        self.vocab_size = vocab_size
        self.nan_token: int | None = None
        """Rows of this token are not finite."""
        self.num_branch_steps = 0
        self.num_proposal_passes = 0
        num_columns = lookahead + 1
        self.pages_S = torch.full((num_blocks * self.block_size,), _UNWRITTEN)
        self.proposals_XP = torch.full((num_slots, num_columns), _UNWRITTEN)
        self.own_XNP = torch.full((num_slots, num_branches, num_columns), _UNWRITTEN)

    def prefill(self, batch: PagedBatch) -> int | None:
        """Store a chunk of one prompt."""
        first, count = int(batch.first_positions_B[0]), int(batch.num_columns_B[0])
        self._write(batch.block_tables_BJ[0], first, batch.tokens_BP[0, :count])
        tokens = batch.tokens_BP[0, :count].tolist()
        return tokens.index(self.nan_token) if self.nan_token in tokens else None

    def end_session(self, slot: int) -> None:
        """Clear the segments of the session."""
        self.proposals_XP[slot] = self.own_XNP[slot] = _UNWRITTEN

    def run_proposals(self, batch: ProposalBatch) -> torch.Tensor:
        """Fill proposal segments; return logits_BPV of the used columns, zero elsewhere."""
        self.num_proposal_passes += 1
        logits_BPV = torch.zeros((*batch.tokens_BP.shape, self.vocab_size))
        for row, slot in enumerate(batch.slots_B.tolist()):
            self.proposals_XP[slot] = _UNWRITTEN
            trunk_S = self._trunk(batch.block_tables_BJ[row], int(batch.trunk_lengths_B[row]))
            for column in range(int(batch.num_columns_B[row])):
                self.proposals_XP[slot, column] = batch.tokens_BP[row, column]
                seen_S = torch.cat([trunk_S, self.proposals_XP[slot, : column + 1]])
                logits_BPV[row, column] = self._law(seen_S)
        return logits_BPV

    def run_branches(self, batch: BranchBatch) -> torch.Tensor:
        """Run one step of all branches; return logits_BNV."""
        self.num_branch_steps += 1
        logits_BNV = torch.zeros((*batch.tokens_BN.shape, self.vocab_size))
        for row, slot in enumerate(batch.slots_B.tolist()):
            trunk_S = self._trunk(batch.block_tables_BJ[row], int(batch.trunk_lengths_B[row]))
            self.own_XNP[slot, : batch.tokens_BN.shape[1], batch.step] = batch.tokens_BN[row]
            for branch, accepted in enumerate(batch.accepted_BN[row].tolist()):
                proposal_S = self.proposals_XP[slot, : accepted + 1]
                own_S = self.own_XNP[slot, branch, : batch.step + 1]
                logits_BNV[row, branch] = self._law(torch.cat([trunk_S, proposal_S, own_S]))
        return logits_BNV

    def append_proposal(self, batch: AppendBatch) -> None:
        """Append the first entries of proposal segments to their trunks."""
        for slot, count, length, blocks_J in zip(*batch, strict=True):
            self._write(blocks_J, int(length), self.proposals_XP[slot, : int(count)])

    def promote_branches(self, slots_B: torch.Tensor, branches_B: torch.Tensor) -> None:
        """Copy the own entries of branches to the proposal segments."""
        self.proposals_XP[slots_B] = self.own_XNP[slots_B, branches_B]

    def _law(self, seen_S: torch.Tensor) -> torch.Tensor:
        assert int(seen_S.min()) >= 0, "attends to a position that was never stored"
        if int(seen_S[-1]) == self.nan_token:
            return torch.full((self.vocab_size,), torch.nan)
        return law(seen_S, self.vocab_size)

    def _trunk(self, blocks_J: torch.Tensor, length: int) -> torch.Tensor:
        return self.pages_S[self._places(blocks_J)[:length]]

    def _write(self, blocks_J: torch.Tensor, first: int, tokens_S: torch.Tensor) -> None:
        if not tokens_S.numel():
            return
        places_S = self._places(blocks_J)[first : first + tokens_S.numel()]
        assert places_S.numel() == tokens_S.numel(), "a position is outside the block table"
        assert int(places_S.min()) >= self.block_size, "a real token in reserved block 0"
        self.pages_S[places_S] = tokens_S

    def _places(self, blocks_J: torch.Tensor) -> torch.Tensor:
        offsets_C = torch.arange(self.block_size)
        return (blocks_J[:, None] * self.block_size + offsets_C).flatten()
