"""The reference for kernels on pages: gathered pages and matrix products in float32."""

import torch
from torch import Tensor

from ssd.engine.attention.dense import attend_dense
from ssd.engine.attention.paged import Attend, num_visible


class PagedReference:
    """Attention as the formula defines it, on any device; the keys are copied."""

    name = "reference"
    block_size = 16

    def prepare(
        self,
        block_tables_BJ: Tensor,
        lengths_B: Tensor,
        *,
        num_queries: int,
        num_pages: int,  # noqa: ARG002 - part of the Protocol
        is_causal: bool,
    ) -> Attend:
        """See ``PagedAttention.prepare``."""
        num_visible_BQ = num_visible(lengths_B, num_queries, is_causal=is_causal)

        def attend(
            queries_BQHE: Tensor, keys_YCGE: Tensor, values_YCGE: Tensor
        ) -> tuple[Tensor, Tensor]:
            keys_BSGE = keys_YCGE[block_tables_BJ].flatten(1, 2)
            values_BSGE = values_YCGE[block_tables_BJ].flatten(1, 2)
            position_S = torch.arange(keys_BSGE.shape[1], device=lengths_B.device)
            visible_BQS = position_S < num_visible_BQ[:, :, None]
            return attend_dense(queries_BQHE, keys_BSGE, values_BSGE, visible_BQS)

        return attend
