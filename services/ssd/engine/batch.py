"""The inputs of forward passes. All tensors are int64 on the CPU; the runner moves them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Columns of several sequences, causal over their pages.

    Column i of sequence b is at position ``first_positions_B[b] + i``; columns from
    ``num_columns_B[b]`` on are padding, written to block 0 and never read.
    """

    tokens_BP: Tensor
    first_positions_B: Tensor
    num_columns_B: Tensor
    block_tables_BJ: Tensor
    """Blocks of the context in order; missing blocks are 0."""
    slots_B: Tensor | None = None
    """Slots of the sequences, if a token is chosen at each column; None if none is."""
    keeps_rows: bool = field(default=False, kw_only=True)
    """Whether the pass may be padded to the rows of the pass before it."""
    prompts: "PagedBatch | None" = field(default=None, kw_only=True)
    """Chunks of prompts of other sequences, which the pass stores too."""


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """A draft's causal pass over the newest token and the proposal of each session.

    It runs when a session opens, and after a commit whose proposal is no branch.

    Column i is at position ``trunk_lengths_B[b] + i`` and sees the trunk and the columns up to
    itself. Its keys and values become the proposal segment of session slot ``slots_B[b]``.
    """

    slots_B: Tensor
    tokens_BP: Tensor
    num_columns_B: Tensor
    trunk_lengths_B: Tensor
    block_tables_BJ: Tensor


@dataclass(frozen=True, slots=True)
class BranchBatch:
    """Step ``step`` (0..P-1) of N branches of each session, at most those of the engine.

    The token of a branch is at position ``trunk_lengths_B[b] + 1 + accepted_BN + step``. It sees
    the trunk, proposal columns 0..accepted, and its own columns 0..step.
    """

    slots_B: Tensor
    tokens_BN: Tensor
    accepted_BN: Tensor
    step: int
    trunk_lengths_B: Tensor
    block_tables_BJ: Tensor


class AppendBatch(NamedTuple):
    """The first ``num_entries_B`` proposal columns of each session, which join its trunk.

    The tables contain the pages of positions trunk_length..trunk_length+num_entries-1.
    """

    slots_B: Tensor
    num_entries_B: Tensor
    trunk_lengths_B: Tensor
    block_tables_BJ: Tensor


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Top-k and min-p of rows, as ``sampling.soft_filters`` applies them."""

    ranks_R: NDArray[np.int64]
    """See ``soft_filters.ranks_of``; 0 without top-k."""
    min_logit_R: NDArray[np.float32]
    """The lowest logit that min-p keeps less the largest one; -inf without min-p."""


@dataclass(frozen=True, slots=True)
class StoredNoise:
    """The Gumbel noise with which a table chooses its tokens, float32 and finite."""

    temperature_R: Tensor
    """Temperature of each branch, float32, >= 0."""
    noise_YV: Tensor
    rows_KR: NDArray[np.int64]
    """The row of ``noise_YV`` for the token that each step chooses for each branch."""
    filters: RowFilters | None = None
    """Filters of each branch: they change the logits that the noise is added to. Those of one
    session are the same in all rows. None: no row has a filter."""


def joined(batches: Sequence[PagedBatch]) -> PagedBatch:
    """Return the sequences of batches that have the same numbers of columns and blocks."""
    names = "tokens_BP", "first_positions_B", "num_columns_B", "block_tables_BJ"
    return PagedBatch(*(torch.cat([getattr(batch, name) for batch in batches]) for name in names))


def pad_sequences(batch: PagedBatch, count: int) -> PagedBatch:
    """Add sequences without columns, up to ``count``."""
    missing = count - len(batch.first_positions_B)
    if missing == 0:
        return batch
    return PagedBatch(
        tokens_BP=pad(batch.tokens_BP, (0, 0, 0, missing)),
        first_positions_B=pad(batch.first_positions_B, (0, missing)),
        num_columns_B=pad(batch.num_columns_B, (0, missing)),
        block_tables_BJ=pad(batch.block_tables_BJ, (0, 0, 0, missing)),
    )
