"""Attention that is left out of CUDA graphs."""

from torch import Tensor

from ssd.engine.attention.paged import Attend, PagedAttention
from ssd.engine.capture import CaptureError, is_capturing


class NotCapturable:
    """Attention that no graph can contain, so that passes are captured in pieces."""

    def __init__(self, attention: PagedAttention) -> None:
        self.name = attention.name
        self.block_size = attention.block_size
        self._attention = attention

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
        attend = self._attention.prepare(
            block_tables_BJ,
            lengths_B,
            num_queries=num_queries,
            num_pages=num_pages,
            is_causal=is_causal,
        )

        def attend_eagerly(
            queries_BQHE: Tensor, keys_YCGE: Tensor, values_YCGE: Tensor
        ) -> tuple[Tensor, Tensor]:
            if is_capturing():
                raise CaptureError("this attention is not captured")
            return attend(queries_BQHE, keys_YCGE, values_YCGE)

        return attend_eagerly
