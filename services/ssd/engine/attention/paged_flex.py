"""Attention to pages by torch's FlexAttention: Triton kernels that torch generates.

All pages are the keys of one batch entry. A block mask lists the pages of each sequence, and a mask
function maps a slot of a page to its position.

*Decision*: the block mask has no full blocks, so the kernel masks every page. *Because*: with full
blocks, torch's decoding kernel divides the slots of the whole storage among its splits. One
sequence uses a small part of them, and most splits would have no work. *Not chosen*: full blocks
for prefills only, which use another kernel and would save a comparison for each score. *Revisit
when* torch divides the blocks of a sequence instead, as it does without full blocks.

*Decision*: passes of targets in torch's decoding kernel read all columns of a block table, in
splits of a fixed size. *Because*: the kernel divides the pages that a pass sees by the number of
splits, so the same token would be summed in other groups in a pass that is one page longer. Columns
beyond a text list the reserved page, which stays in the cache of the device. The other kernel reads
pages in order, and a masked one changes no bit, so it reads no more than its pass sees. *Not
chosen*: one split, in which a few of the device's processors would read a long text alone.

X: rows of the block mask, one for 128 queries.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)

from ssd.engine.attention.paged import Attend, num_visible
from ssd.engine.compiler import compiled_by_shape

BLOCK_BITS = 7
BLOCK_SIZE = 1 << BLOCK_BITS
BEYOND = 1 << 30
"""A position that no query sees; the storage has fewer slots."""
FIXED_SPLIT = 512
"""Slots of a split of the decoding kernel in passes of targets, up to ``MAX_SPLITS``."""
MAX_SPLITS = 32
"""The kernel stores a float32 sum of each query for each split."""
MAX_STAGED_BYTES = 256
"""Largest size of a key of one head of which three blocks fit the shared memory, also on sm_80."""


class PageMask(NamedTuple):
    """What the queries of a pass see; all int32."""

    num_pages_B1X: Tensor
    """Number of pages that some query of a mask row sees."""
    num_columns_B1X: Tensor
    """J, the number of columns of the block table."""
    pages_B1XJ: Tensor
    """The pages of the block table, in order."""
    shifts_BY: Tensor
    """Added to the index of a slot of a page, gives its position in the sequence; ``BEYOND`` for
    pages of other sequences."""
    num_visible_BQ: Tensor


class PagedFlex:
    """FlexAttention, compiled for each shape of a pass; eager on devices without Triton."""

    name = "flex"
    block_size = BLOCK_SIZE

    def __init__(self, *, is_compiled: bool = True, is_deterministic: bool = False) -> None:
        """Choose compiled or eager execution; the first pass of a shape compiles its kernel."""
        self._attend: Callable[..., tuple[Tensor, Tensor]] = partial(
            attend, has_fixed_splits=is_deterministic
        )
        if is_compiled:
            self._attend = compiled_by_shape(self._attend, has_one_order=is_deterministic)

    def prepare(
        self,
        block_tables_BJ: Tensor,
        lengths_B: Tensor,
        *,
        num_queries: int,
        num_pages: int,
        is_causal: bool,
    ) -> Attend:
        """See ``PagedAttention.prepare``."""
        num_visible_BQ = num_visible(lengths_B, num_queries, is_causal=is_causal)
        return partial(self._attend, make_mask(block_tables_BJ, num_visible_BQ, num_pages))


def make_mask(block_tables_BJ: Tensor, num_visible_BQ: Tensor, num_pages: int) -> PageMask:
    """Build the mask of a pass on the device."""
    num_sequences, num_columns = block_tables_BJ.shape
    device = block_tables_BJ.device
    num_queries = num_visible_BQ.shape[1]
    last_query_X = [
        min(first + BLOCK_SIZE, num_queries) - 1 for first in range(0, num_queries, BLOCK_SIZE)
    ]
    num_pages_BX = _num_blocks(torch.stack([num_visible_BQ[:, q] for q in last_query_X], dim=1))
    column_J = torch.arange(num_columns, device=device, dtype=torch.int32)
    # One more page receives the shifts of unused columns.
    shifts_BY = torch.full(
        (num_sequences, num_pages + 1), BEYOND, dtype=torch.int32, device=device
    ).scatter_(
        1,
        # The last query sees all pages of its sequence.
        block_tables_BJ.where(column_J < num_pages_BX[:, -1:], num_pages).long(),
        (column_J - block_tables_BJ) * BLOCK_SIZE,
    )
    return PageMask(
        num_pages_B1X=num_pages_BX[:, None],
        num_columns_B1X=torch.full_like(num_pages_BX[:, None], num_columns),
        pages_B1XJ=block_tables_BJ[:, None, None].expand(-1, 1, len(last_query_X), -1).contiguous(),
        shifts_BY=shifts_BY,
        num_visible_BQ=num_visible_BQ.contiguous(),
    )


def _num_blocks(num_positions: Tensor) -> Tensor:
    return (num_positions.clamp(min=0) + BLOCK_SIZE - 1) // BLOCK_SIZE


def attend(
    mask: PageMask,
    queries_BQHE: Tensor,
    keys_YCGE: Tensor,
    values_YCGE: Tensor,
    *,
    has_fixed_splits: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in one layer; see ``Attend``."""

    def is_visible(sequence: Tensor, _head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        position = slot + mask.shifts_BY[sequence, slot >> BLOCK_BITS]
        return position < mask.num_visible_BQ[sequence, query]

    _, num_queries, num_heads, head_size = queries_BQHE.shape
    num_pages, _, num_kv_heads, _ = keys_YCGE.shape
    group = num_heads // num_kv_heads
    options = kernel_options(num_queries, group, head_size, keys_YCGE.element_size())
    num_pages_B1X = mask.num_pages_B1X
    if has_fixed_splits and options:
        num_pages_B1X = mask.num_columns_B1X
        num_slots = mask.pages_B1XJ.shape[-1] * BLOCK_SIZE
        num_splits = min(-(-num_slots // FIXED_SPLIT), MAX_SPLITS)
        options["SPLIT_KV"] = num_splits  # type: ignore[typeddict-unknown-key]
    block_mask = BlockMask.from_kv_blocks(
        num_pages_B1X,
        mask.pages_B1XJ,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=is_visible,
        seq_lengths=(num_queries, num_pages * BLOCK_SIZE),
        compute_q_blocks=False,
    )
    out_BHQE, aux = flex_attention(
        queries_BQHE.transpose(1, 2),
        keys_YCGE.flatten(0, 1).transpose(0, 1)[None],
        values_YCGE.flatten(0, 1).transpose(0, 1)[None],
        block_mask=block_mask,
        enable_gqa=True,
        kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return out_BHQE.transpose(1, 2), aux.lse


def kernel_options(
    num_queries: int, group: int, head_size: int, element_size: int
) -> FlexKernelOptions:
    """Set the block of the decoding kernel; the other kernel has good defaults.

    Torch chooses the decoding kernel for less than 128 queries and a power of two as group. By
    default, all rows of a group are one block of two warps. Compiled for sm_90, 128 rows of head
    size 64 then spill 9 KB a thread, and nothing with four warps. More rows than those of the block
    mask do not divide them, and torch finds no kernel. Torch 2.13 means to load three blocks ahead
    on sm_90, but its last rule overrides that one.
    """
    if num_queries >= BLOCK_SIZE or group & (group - 1):
        return {}
    num_rows = num_queries * group
    options: FlexKernelOptions = {
        "num_warps": 8 if num_rows > 64 and head_size > 64 else 4,
        "num_stages": 3 if head_size * element_size <= MAX_STAGED_BYTES else 1,
    }
    if num_rows > BLOCK_SIZE:
        options["BLOCK_M"] = BLOCK_SIZE
    return options
