"""Attention by matrix products in float32: the reference of kernels, and the segments of a draft.

*Decision*: a draft attends to its segments in one product, in which the trunk takes the place of an
entry. *Because*: a pass on a GPU contains many small operations for each layer, and each costs more
than a microsecond. Products of their own for two segments, and a merge, are 58 kernels for a layer;
this is 13. *Not chosen*: a kernel of our own, before a GPU has shown what it gains.
"""

import torch
from torch import Tensor

from ssd.engine.attention.paged import Attend, num_visible


def attend_dense(
    queries_BQHE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, visible_BQS: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to S entries of each sequence, without synchronisation.

    Args:
        queries_BQHE: the queries; query heads of one key/value head are consecutive.
        keys_BSGE: keys of the entries, finite.
        values_BSGE: their values, finite.
        visible_BQS: bool, the entries that a query sees.

    Returns:
        The weighted values [B, Q, H, E] in the dtype of the queries, and the log-sum-exp of the
        scaled scores [B, H, Q], fp32. A query that sees no entry gets 0 and -inf.
    """
    scores_BGQXS = _scores(queries_BQHE, keys_BSGE, visible_BQS)
    mass_BGQX = torch.logsumexp(scores_BGQXS, dim=-1)
    # Clamped, since -inf minus -inf is NaN.
    lowest = torch.finfo(torch.float32).min
    weights_BGQXS = torch.exp(scores_BGQXS - mass_BGQX.clamp(min=lowest)[..., None])
    out_BGQXE = _weighted(weights_BGQXS, values_BSGE)
    out_BQGXE = out_BGQXE.transpose(1, 2).to(queries_BQHE.dtype)
    return out_BQGXE.reshape(queries_BQHE.shape), mass_BGQX.transpose(2, 3).flatten(1, 2)


def attend_beside(
    part: tuple[Tensor, Tensor],
    queries_BQHE: Tensor,
    keys_BSGE: Tensor,
    values_BSGE: Tensor,
    visible_BQS: Tensor,
) -> Tensor:
    """Attend to all entries of a query, given the result for a part of them.

    The part takes the place of an entry with its log-sum-exp as score and its result as value. This
    equals a merge by log-sum-exp.

    ``part`` is as ``Attend`` returns it, the other arguments are as in ``attend_dense``. Each query
    sees an entry of the part or of the others.

    Returns:
        The weighted values [B, Q, H, E] in the dtype of the queries.
    """
    part_BQHE, mass_BHQ = part
    num_kv_heads = keys_BSGE.shape[2]
    scores_BGQXS = _scores(queries_BQHE, keys_BSGE, visible_BQS)
    mass_BGQX1 = mass_BHQ.unflatten(1, (num_kv_heads, -1)).transpose(2, 3)[..., None]
    weights_BGQXS = torch.cat((scores_BGQXS, mass_BGQX1), dim=-1).softmax(dim=-1)
    part_BGQXE = part_BQHE.unflatten(2, (num_kv_heads, -1)).transpose(1, 2)
    out_BGQXE = _weighted(weights_BGQXS[..., :-1], values_BSGE)
    out_BGQXE = torch.addcmul(out_BGQXE, weights_BGQXS[..., -1:], part_BGQXE)
    return out_BGQXE.transpose(1, 2).to(queries_BQHE.dtype).reshape(queries_BQHE.shape)


class PagedReference:
    """The reference for kernels on pages, on any device; the keys are copied."""

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


def _scores(queries_BQHE: Tensor, keys_BSGE: Tensor, visible_BQS: Tensor) -> Tensor:
    """Return scaled scores, [B, G, Q, X, S] for X query heads of a key/value head."""
    _, queries, _, size = queries_BQHE.shape
    queries_BQGXE = queries_BQHE.unflatten(2, (keys_BSGE.shape[2], -1))
    queries_BGUE = _contiguous(queries_BQGXE.transpose(1, 2)).flatten(2, 3)
    scores_BGUS = queries_BGUE @ _contiguous(keys_BSGE.permute(0, 2, 3, 1)) * size**-0.5
    scores_BGQXS: Tensor = scores_BGUS.unflatten(2, (queries, -1))
    return torch.where(visible_BQS[:, None, :, None], scores_BGQXS, -torch.inf)


def _weighted(weights_BGQXS: Tensor, values_BSGE: Tensor) -> Tensor:
    shape_QX = weights_BGQXS.shape[2:4]
    out_BGUE = weights_BGQXS.flatten(2, 3) @ _contiguous(values_BSGE.transpose(1, 2))
    out_BGQXE: Tensor = out_BGUE.unflatten(2, shape_QX)
    return out_BGQXE


def _contiguous(tensor: Tensor) -> Tensor:
    """Convert to float32 and copy in one operation, since products of strided tensors copy too."""
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)
