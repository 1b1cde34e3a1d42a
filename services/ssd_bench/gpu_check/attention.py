"""Attention kernels on pages against attention to each sequence on its own, in float64."""

from importlib.util import find_spec

import torch

from ssd.engine.attention.check import compare_paged, paged_cases
from ssd.engine.attention.paged import PagedAttention, make_paged
from ssd.engine.attention.paged_flex import PagedFlex
from ssd_bench.gpu_check.outcome import Environment, Figure, SkipError, WrongResultError

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest absolute difference of values and of log-sum-exps for normal inputs. In bfloat16, values
below 4 are rounded by up to 0.008."""
CPU_CASES = ("a verify around page boundaries",)
"""Eager FlexAttention traces each case for seconds."""


def check_flash_attn(environment: Environment) -> dict[str, Figure]:
    """Check the kernels of the package flash-attn."""
    if not environment.is_cuda:
        raise SkipError("flash-attn needs CUDA")
    if find_spec("flash_attn") is None:
        raise SkipError("the package flash-attn is not installed; flex is used")
    backend = make_paged("flash_attn", environment.target_device, "bfloat16").attention
    return _compare(backend, torch.bfloat16, environment)


def check_flex(environment: Environment) -> dict[str, Figure]:
    """Check FlexAttention: compiled on a GPU, eager on a CPU."""
    backend = PagedFlex(is_compiled=environment.is_cuda)
    dtype = torch.bfloat16 if environment.is_cuda else torch.float32
    return _compare(backend, dtype, environment)


def _compare(
    backend: PagedAttention, dtype: torch.dtype, environment: Environment
) -> dict[str, Figure]:
    """Compare all cases.

    Raises:
        WrongResultError: a case differs by more than the tolerance; all such cases are named.
    """
    cases = paged_cases(backend.block_size)
    if not environment.is_cuda:
        cases = {name: cases[name] for name in CPU_CASES}
    wrong, worst = [], 0.0
    for name, case in cases.items():
        difference = compare_paged(backend, case, dtype, environment.target_device)
        largest = max(difference.out, difference.log_sum_exp)
        worst = max(worst, largest)
        if largest > TOLERANCES[dtype]:
            wrong.append(f"{name} by {largest:.3g}")
    if wrong:
        raise WrongResultError(
            f"{backend.name} differs in {len(wrong)} of {len(cases)} cases "
            f"(tolerance {TOLERANCES[dtype]}): {'; '.join(wrong)}"
        )
    return {"cases": len(cases), "largest_difference": worst}
