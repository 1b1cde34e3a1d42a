"""The interface between a tree and the passes of a draft model."""

from collections.abc import Collection
from typing import Protocol

import torch

from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch, StoredNoise


class TreeRunner(Protocol):
    """The methods of ``DraftRunner`` that the tree uses. Step thread only."""

    def prefill(self, batch: PagedBatch) -> int | None:
        """Store the KV of one chunk of one prompt; returns the first column that is not finite."""
        ...

    def run_proposals(self, batch: ProposalBatch) -> torch.Tensor:
        """Fill proposal segments; returns logits_BPV, float32."""
        ...

    def run_branches(self, batch: BranchBatch) -> torch.Tensor:
        """Run one step of all branches; returns logits_BNV, float32.

        The steps of a batch run in order. Steps of another batch, with another tensor ``slots_B``,
        and other passes over other sessions may run between them. The logits are valid until a
        later table of one of these sessions begins.
        """
        ...

    @property
    def whole_branches(self) -> Collection[int]:
        """Numbers of branches for which ``run_columns`` is one pass."""
        ...

    def run_columns(
        self, batch: BranchBatch, noise: StoredNoise
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run and choose all columns of the table of one session.

        Returns:
            Tokens [K, 1, N], ``NO_TOKEN`` where no score is finite, and the logits [1, N, V] of
            each step, valid as those of ``run_branches``.
        """
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
