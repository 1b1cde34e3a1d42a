"""Attention kernels on pages against attention to each sequence on its own, in float64.

FlexAttention is the default of a GPU without flash-attn, and its bfloat16 kernels run on no other
device: Triton's interpreter multiplies the bit patterns of bfloat16 numbers as integers. In version
3.9, a product of two small matrices was that of their bits exactly, 1.9e10 instead of 11; in
float16 it was right. The first check of attention is therefore this one on the GPU.
"""

from collections.abc import Sequence
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
FLEX_CASES = (
    *("a verify around page boundaries", "a trunk", "a chunk of a prompt", "one query"),
    *("8192 positions", "4 query heads of a key head"),
)
"""The shapes of targets and drafts. Each takes seconds to compile, so the others are checked last,
with the time that is left."""


def check_flash_attn(environment: Environment) -> dict[str, Figure]:
    """Check the kernels of the package flash-attn."""
    if not environment.is_cuda:
        raise SkipError("flash-attn needs CUDA")
    if find_spec("flash_attn") is None:
        raise SkipError("the package flash-attn is not installed; flex is used")
    backend = make_paged("flash_attn", environment.target_device, "bfloat16").attention
    return _compare(backend, torch.bfloat16, environment)


def check_flex(environment: Environment) -> dict[str, Figure]:
    """Check FlexAttention as targets and drafts use it: compiled on a GPU, eager on a CPU."""
    backend = PagedFlex(is_compiled=environment.is_cuda)
    dtype = torch.bfloat16 if environment.is_cuda else torch.float32
    return _compare(backend, dtype, environment, FLEX_CASES)


def check_flex_shapes(environment: Environment) -> dict[str, Figure]:
    """Check FlexAttention in all other shapes."""
    if not environment.is_cuda:
        raise SkipError("a CPU traces each shape for seconds, and one has been checked")
    backend = PagedFlex()
    others = tuple(each for each in paged_cases(backend.block_size) if each not in FLEX_CASES)
    return _compare(backend, torch.bfloat16, environment, others)


def _compare(
    backend: PagedAttention,
    dtype: torch.dtype,
    environment: Environment,
    names: Sequence[str] = (),
) -> dict[str, Figure]:
    """Compare the named cases, or all.

    Raises:
        WrongResultError: a case differs by more than the tolerance; all such cases are named.
    """
    cases = paged_cases(backend.block_size)
    chosen = (names or tuple(cases)) if environment.is_cuda else CPU_CASES
    cases = {name: cases[name] for name in chosen}
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
