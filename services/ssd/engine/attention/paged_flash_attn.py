"""Attention to pages by the package flash-attn, version 2.

Its contract, from its docstring and source (2.7): pages have a multiple of 256 slots; block tables
and lengths are int32; the causal mask is aligned to the bottom right, so the last query sees the
whole length; the log-sum-exp is [B, H, Q], natural, in fp32; a query that sees nothing gets 0, and
+inf as its log-sum-exp. Version 3 has another module and other names, and is not used.

*Splits*: the package divides the slots of a block table among the processors of a GPU, into fewer
splits for more sequences (``num_splits_heuristic`` in its ``flash_api.cpp``). A query beyond the
first split would have other bits beside other sequences. The splits of targets therefore depend on
the width of the table only, which all passes of a target share.
"""

import torch
from flash_attn import flash_attn_with_kvcache
from torch import Tensor

from ssd.engine.attention.paged import Attend

SPLIT_SLOTS = 512
"""Slots of a split in passes of targets."""
MAX_SPLITS = 32
"""The package stores a float32 sum of each query for each split; it allows 128."""


class PagedFlashAttention:
    """``flash_attn_with_kvcache``: CUDA, bf16 and fp16."""

    name = "flash_attn"
    block_size = 256

    def __init__(self, *, is_deterministic: bool = False) -> None:
        self._has_fixed_splits = is_deterministic

    def prepare(
        self,
        block_tables_BJ: Tensor,
        lengths_B: Tensor,
        *,
        num_queries: int,  # noqa: ARG002 - part of the Protocol
        num_pages: int,  # noqa: ARG002 - part of the Protocol
        is_causal: bool,
    ) -> Attend:
        """See ``PagedAttention.prepare``."""
        # A verify does not read the log-sum-exps; queries on a trunk see nothing if it is empty.
        num_slots = block_tables_BJ.shape[1] * self.block_size
        # 0: the package chooses.
        fixed_splits = min(-(-num_slots // SPLIT_SLOTS), MAX_SPLITS)
        num_splits = fixed_splits if self._has_fixed_splits else 0
        is_empty_B11 = None if is_causal else (lengths_B == 0)[:, None, None]

        def attend(
            queries_BQHE: Tensor, keys_YCGE: Tensor, values_YCGE: Tensor
        ) -> tuple[Tensor, Tensor]:
            out_BQHE, mass_BHQ = flash_attn_with_kvcache(
                queries_BQHE,
                keys_YCGE,
                values_YCGE,
                cache_seqlens=lengths_B,
                block_table=block_tables_BJ,
                causal=is_causal,
                num_splits=num_splits,
                return_softmax_lse=True,
            )
            if is_empty_B11 is not None:
                mass_BHQ = mass_BHQ.masked_fill(is_empty_B11, -torch.inf)
            return out_BQHE, mass_BHQ

        return attend
