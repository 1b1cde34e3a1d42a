"""Partial attentions over disjoint slots, merged by their log-sum-exp."""

import torch
from torch import Tensor


def merge_partials(outs: list[Tensor], masses: list[Tensor]) -> Tensor:
    """Merge partial results in the order given.

    A partial whose mass is -inf contributes exactly nothing: the bits of the result are those of
    the merge without it, so a longer batch mate changes nothing.

    Args:
        outs: [B, G, U, E] each.
        masses: log-sum-exp [B, G, U] each, fp32; some partial of each row is finite.

    Returns:
        [B, G, U, E] in the dtype of the partials.
    """
    mass_XBGU = torch.stack(masses)
    weight_XBGU = torch.exp(mass_XBGU - mass_XBGU.amax(dim=0))
    total_BGUE = outs[0].float() * weight_XBGU[0, ..., None]
    sum_BGU = weight_XBGU[0]
    for out_BGUE, weight_BGU in zip(outs[1:], weight_XBGU[1:], strict=True):
        total_BGUE = total_BGUE + out_BGUE.float() * weight_BGU[..., None]
        sum_BGU = sum_BGU + weight_BGU
    return (total_BGUE / sum_BGU[..., None]).to(outs[0].dtype)
