"""Attention of the engine torch: the fused CPU kernel, or products if no log-sum-exp is needed.

Letters: Q queries of a sequence (its columns or branches), U query rows times query heads of a
key/value head, X partial results.

*Decision*: ``attend_whole`` computes softmax(QK)V with matrix products. *Because*: with the 48
query rows of branches for each key/value head, two batched products and a softmax took half the
time of the fused kernel (245 instead of 470 us; 8 heads of 32, 495 entries, one AVX-512 core). *Not
chosen*: separate attention to the own entries of branches, which costs more than the masked
columns. *Revisit when* contexts have thousands of tokens and the scores no longer fit the cache.

*Decision*: the weights of merged parts are a softmax in float64, rounded once. *Because*: torch's
float32 softmax took another exponential for the last entries of a tensor than for those before, so
a row's bits depended on its place in the batch (2 of 3 places differed, AVX-512, torch 2.13).
*Not chosen*: exp and sum in float32, which takes twice the operations and gave equal bits only by
chance of one kernel. *Revisit when* the merge is visible in a profile.
"""

import torch
from torch import Tensor


def attend(
    queries_BGUE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, mask_B1US: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to S entries, in bf16 or fp32.

    Args:
        queries_BGUE: the query rows of each key/value head.
        keys_BSGE: keys of the gathered entries.
        values_BSGE: their values.
        mask_B1US: 0 or -inf, added to the scaled scores; some column of each row is 0.

    Returns:
        The weighted values [B, G, U, E] and the log-sum-exp of the scores [B, G, U] (fp32).
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the only one with a log-sum-exp
    out_BGUE, mass_BGU = kernel(
        queries_BGUE,
        keys_BSGE.transpose(1, 2),
        values_BSGE.transpose(1, 2),
        0.0,
        is_causal=False,
        attn_mask=mask_B1US,
    )
    return out_BGUE, mass_BGU


def attend_whole(
    queries_BGUE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, mask_B1US: Tensor
) -> Tensor:
    """Attend to the whole context: ``attend`` without the log-sum-exp, in the fastest way.

    For the passes of a draft, whose bits may depend on the batch: a draft only proposes.
    """
    scale = queries_BGUE.shape[-1] ** -0.5
    # Contiguous, since products of strided keys use a loop that is ten times slower.
    keys_BGSE = keys_BSGE.transpose(1, 2).contiguous()
    values_BGSE = values_BSGE.transpose(1, 2).contiguous()
    scores_BGUS = (queries_BGUE @ keys_BGSE.mT).float()
    weights_BGUS = torch.softmax(torch.add(mask_B1US, scores_BGUS, alpha=scale), dim=-1)
    return weights_BGUS.to(queries_BGUE.dtype) @ values_BGSE


def merge_partials(outs_XBGUE: Tensor, masses_XBGU: Tensor) -> Tensor:
    """Merge partial results over disjoint entries in order, by their log-sum-exp.

    A partial with mass -inf contributes exactly 0. The result has the same bits without it, so a
    longer sequence in the batch changes nothing.

    Args:
        outs_XBGUE: weighted values of each part.
        masses_XBGU: log-sum-exp of each part, fp32; at least one part of each row is finite.

    Returns:
        [B, G, U, E] in the dtype of the parts.
    """
    weights_XBGU = torch.softmax(masses_XBGU, dim=0, dtype=torch.float64).float()
    total_BGUE, *rest = (outs_XBGUE * weights_XBGU[..., None]).unbind(0)
    # Added one by one: a reduction may choose its order by the number of parts.
    for part_BGUE in rest:
        total_BGUE += part_BGUE
    return total_BGUE.to(outs_XBGUE.dtype)
