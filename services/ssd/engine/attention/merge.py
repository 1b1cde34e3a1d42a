"""Partial attentions over disjoint entries, merged by their log-sum-exp.

*Decision*: the weights of the parts are a softmax in float64, rounded once. *Because*: torch's
float32 softmax took another exponential for the last entries of a tensor than for those before, so
a row's bits depended on its place in the batch (2 of 3 places differed, AVX-512, torch 2.13).
*Not chosen*: exp and sum in float32, which takes twice the operations and gave equal bits only by
chance of one kernel. *Revisit when* the merge is visible in a profile.
"""

import torch
from torch import Tensor


def merge_partials(outs_XBGUE: Tensor, masses_XBGU: Tensor) -> Tensor:
    """Merge X partial results in order.

    A partial with mass -inf contributes exactly 0: the bits of the result equal those of the merge
    without it, so a longer sequence in the batch changes nothing.

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
