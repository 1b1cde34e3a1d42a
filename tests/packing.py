"""Conditions of tests: CPUs that pack bfloat16 weights, and CPUs that do not."""

import pytest
import torch
from torch import Tensor

from ssd.engine.layers.linear import packing_problem

AVX2_ERROR = (
    "mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw, "
    "avx512vl and avx512dq\nException raised from mkldnn_reorder_linear_weight"
)
"""Error of a CPU with AVX2 only for a bfloat16 weight."""
_PROBLEM = packing_problem(torch.bfloat16)
needs_packed_bfloat16 = pytest.mark.skipif(
    _PROBLEM is not None, reason=f"packed bfloat16 linears: {_PROBLEM}"
)
"""Marks a test, or a parameter of one, that needs packed bfloat16 linears."""


def fail_to_pack_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Make packing fail as on a CPU with AVX2 only, until the patch is undone.

    Also call ``packing_problem.cache_clear`` after that.
    """
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def refuse(weight_OI: Tensor, rows: int | None = None) -> Tensor:
        if weight_OI.dtype is torch.bfloat16:
            raise RuntimeError(AVX2_ERROR)
        packed: Tensor = reorder(weight_OI, rows)
        return packed

    patch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    packing_problem.cache_clear()
