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

EDGES = (128, 256, 512, 2048, 4096)
"""Positions at which a pass has one page more, or one split more."""
COLUMNS = 7


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


def check_flex_bits(environment: Environment) -> dict[str, Figure]:
    """Check that a query of a deterministic pass has the same bits in each column.

    Plain decoding runs the token at position p in column 0 of a pass, which then ends at p + K;
    speculation runs it in a later column, and the pass ends earlier, perhaps a page earlier.

    Raises:
        WrongResultError: names the positions at which bits differ.
    """
    backend = PagedFlex(is_compiled=environment.is_cuda, is_deterministic=True)
    last = EDGES[-1] if environment.is_cuda else EDGES[0]
    positions = [edge + shift for edge in EDGES if edge <= last for shift in (-2, -1, 0)]
    device, page = environment.target_device, backend.block_size
    num_pages = 2 + (last + COLUMNS) // page
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if environment.is_cuda else torch.float32
    queries_SHE = torch.randn((num_pages * page, 8, 64), generator=generator).to(device, dtype)
    keys_YCGE, values_YCGE = (
        torch.randn((2, num_pages + 1, page, 2, 64), generator=generator).to(device, dtype)
    ).unbind(0)
    table_1J = torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)[None]

    def attended(first: int) -> torch.Tensor:
        """Return the results of columns at positions ``first``, ``first`` + 1, …."""
        attend = backend.prepare(
            table_1J,
            torch.tensor([first + COLUMNS], dtype=torch.int32, device=device),
            num_queries=COLUMNS,
            num_pages=num_pages + 1,
            is_causal=True,
        )
        found_1QHE, _ = attend(queries_SHE[None, first : first + COLUMNS], keys_YCGE, values_YCGE)
        return found_1QHE[0]

    wrong = [
        f"position {position} in column {column}"
        for position in positions
        for column in range(1, COLUMNS)
        if not torch.equal(attended(position)[0], attended(position - column)[column])
    ]
    if wrong:
        raise WrongResultError(f"flex has other bits at {', '.join(wrong[:8])}")
    return {"positions": len(positions), "columns": COLUMNS}


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
