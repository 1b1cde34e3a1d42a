"""Attention by matrix products, for a few entries and as the reference of the kernels."""

import torch
from torch import Tensor


def attend_dense(
    queries_BQHE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, visible_BQS: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to S entries of each sequence. Computes in float32, without synchronisation.

    Args:
        queries_BQHE: the queries; query heads h of one key/value head are consecutive.
        keys_BSGE: keys of the entries, finite.
        values_BSGE: their values, finite.
        visible_BQS: bool, the entries that a query sees.

    Returns:
        The weighted values [B, Q, H, E] in the dtype of the queries, and the log-sum-exp of the
        scaled scores [B, H, Q], fp32. A query that sees no entry gets 0 and -inf.
    """
    batch, queries, heads, size = queries_BQHE.shape
    num_kv_heads = keys_BSGE.shape[2]
    queries_BGQXE = (
        queries_BQHE.float().view(batch, queries, num_kv_heads, -1, size).transpose(1, 2)
    )
    queries_BGUE = queries_BGQXE.reshape(batch, num_kv_heads, -1, size)
    scores_BGUS = queries_BGUE @ keys_BSGE.float().permute(0, 2, 3, 1) * size**-0.5
    group = heads // num_kv_heads
    hidden_B1US = ~visible_BQS.repeat_interleave(group, dim=1)[:, None]
    scores_BGUS = scores_BGUS.masked_fill(hidden_B1US, -torch.inf)
    mass_BGU = torch.logsumexp(scores_BGUS, dim=-1)
    # Clamped, since -inf minus -inf is NaN.
    lowest = torch.finfo(torch.float32).min
    weights_BGUS = torch.exp(scores_BGUS - mass_BGU.clamp(min=lowest)[..., None])
    out_BGUE = weights_BGUS @ values_BSGE.float().transpose(1, 2)
    out_BQGXE = out_BGUE.view(batch, num_kv_heads, queries, group, size).transpose(1, 2)
    mass_BGXQ = mass_BGU.view(batch, num_kv_heads, queries, group).transpose(2, 3)
    return (
        out_BQGXE.reshape(batch, queries, heads, size).to(queries_BQHE.dtype),
        mass_BGXQ.reshape(batch, heads, queries),
    )
