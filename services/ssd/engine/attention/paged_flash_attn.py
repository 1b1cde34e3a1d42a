"""Attention to pages by the package flash-attn, version 2.

Its contract, from its docstring and source (2.7): pages have a multiple of 256 slots; block tables
and lengths are int32; the causal mask is aligned to the bottom right, so the last query sees the
whole length; the log-sum-exp is [B, H, Q], natural, in fp32; a query that sees nothing gets 0, and
+inf as its log-sum-exp. The number of splits depends on shapes only, not on lengths. Version 3 has
another module and calls the block table ``page_table``; it is not used.
"""

import torch
from flash_attn import flash_attn_with_kvcache
from torch import Tensor

from ssd.engine.attention.paged import Attend


class PagedFlashAttention:
    """``flash_attn_with_kvcache``: CUDA, bf16 and fp16."""

    name = "flash_attn"
    block_size = 256

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
                return_softmax_lse=True,
            )
            if is_empty_B11 is not None:
                mass_BHQ = mass_BHQ.masked_fill(is_empty_B11, -torch.inf)
            return out_BQHE, mass_BHQ

        return attend
