"""Attention kernels on pages against attention to each sequence on its own, in float64.

FlexAttention is the default of a GPU without flash-attn, and its bfloat16 kernels run on no other
device: Triton's interpreter multiplies the bit patterns of bfloat16 numbers as integers. In version
3.9, a product of two small matrices was that of their bits exactly, 1.9e10 instead of 11; in
float16 it was right. The first check of attention is therefore this one on the GPU.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.gpu.environment import Environment, Figure
from tests.paged_attention import compare_paged, paged_cases

from ssd.engine.attention import paged_flex
from ssd.engine.attention.paged import PagedAttention, make_paged
from ssd.engine.attention.paged_flex import PagedFlex

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest absolute difference of values and of log-sum-exps for normal inputs. In bfloat16, values
below 4 are rounded by up to 0.008."""
CPU_CASES = ("a verify around page boundaries",)
"""Eager FlexAttention traces each case for seconds."""
FLEX_CASES = (
    *("a verify around page boundaries", "a trunk", "a chunk of a prompt", "one query"),
    *("8192 positions", "heads of 128, 4 of a key head", "heads of 128, 8 of a key head"),
)
"""The shapes of targets and drafts. Each takes seconds to compile, so the others are checked last,
with the time that is left."""

EDGES = (128, 256, 512, 2048, 4096)
"""Positions at which a pass has one page more, or one split more."""
COLUMNS = 7
NUM_SEQUENCES = 16
HEAD_SIZE = 128
"""That of Llama and Qwen3."""


@pytest.fixture(autouse=True)
def eager_flex(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager FlexAttention traces each shape by default, and warns."""
    if not environment.is_cuda:
        flex = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
        monkeypatch.setattr(flex, True)


@pytest.mark.check("attention flex")
def test_flex_of_targets_and_drafts(environment: Environment, figures: dict[str, Figure]) -> None:
    """Compiled on a GPU, eager on a CPU."""
    backend = PagedFlex(is_compiled=environment.is_cuda)
    _compare(backend, environment, FLEX_CASES if environment.is_cuda else CPU_CASES, figures)


@pytest.mark.check("attention flex, other shapes", on=("cuda",))
def test_flex_in_all_other_shapes(environment: Environment, figures: dict[str, Figure]) -> None:
    backend = PagedFlex()
    others = [each for each in paged_cases(backend.block_size) if each not in FLEX_CASES]
    _compare(backend, environment, others, figures)


@pytest.mark.check("attention flash_attn", on=("cuda",))
def test_flash_attn(environment: Environment, figures: dict[str, Figure]) -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed; flex is used")
    backend = make_paged(
        "flash_attn",
        environment.target_device,
        "bfloat16",
        head_size=128,
        is_deterministic=True,
    ).attention
    _compare(backend, environment, list(paged_cases(backend.block_size)), figures)
    figures |= compare_columns(environment, backend)


def test_a_kernel_that_differs_is_measured(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOLERANCES, torch.float32, -1.0)
    figures: dict[str, Figure] = {}
    with pytest.raises(AssertionError, match="flex differs in 1 of 1 cases"):
        test_flex_of_targets_and_drafts(environment, figures)
    assert figures["cases"] == 1
    assert float(figures["largest_difference"]) < TOLERANCES[torch.bfloat16]


def test_bits_that_depend_on_the_column_are_found(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_column(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out_BQHE, mass_BHQ = attend(*arguments, **options)
        return out_BQHE + torch.arange(out_BQHE.shape[1])[:, None, None], mass_BHQ

    attend = paged_flex.attend
    monkeypatch.setattr(paged_flex, "attend", by_column)
    with pytest.raises(AssertionError, match="other bits at position 126 in column 1"):
        compare_columns(environment, deterministic_flex(environment))


def test_bits_that_depend_on_the_number_of_sequences_are_found(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_count(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out_BQHE, mass_BHQ = attend(*arguments, **options)
        return out_BQHE + len(out_BQHE), mass_BHQ

    attend = paged_flex.attend
    monkeypatch.setattr(paged_flex, "attend", by_count)
    with pytest.raises(AssertionError, match="other bits at position 126 beside 15 sequences"):
        compare_columns(environment, deterministic_flex(environment))


@pytest.mark.check("bits of flex")
def test_a_deterministic_query_has_the_same_bits_in_each_pass(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    figures |= compare_columns(environment, deterministic_flex(environment))


def deterministic_flex(environment: Environment) -> PagedAttention:
    """Return FlexAttention as targets use it."""
    return PagedFlex(is_compiled=environment.is_cuda, is_deterministic=True)


def compare_columns(environment: Environment, backend: PagedAttention) -> dict[str, Figure]:
    """Compare the bits of a query of a deterministic pass in its columns, alone and beside others.

    Plain decoding runs the token at position p in column 0 of a pass, which then ends at p + K;
    speculation runs it in a later column, and the pass ends earlier, perhaps a page earlier.
    """
    last = EDGES[-1] if environment.is_cuda else EDGES[0]
    positions = [edge + shift for edge in EDGES if edge <= last for shift in (-2, -1, 0)]
    device, page = environment.target_device, backend.block_size
    num_pages = 2 + (last + COLUMNS) // page
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if environment.is_cuda else torch.float32
    shape = (num_pages * page, 8, HEAD_SIZE)
    queries_SHE = torch.randn(shape, generator=generator).to(device, dtype)
    keys_YCGE, values_YCGE = (
        torch.randn((2, num_pages + 1, page, 2, HEAD_SIZE), generator=generator).to(device, dtype)
    ).unbind(0)
    table_1J = torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)[None]

    def attended(first: int, count: int = 1) -> torch.Tensor:
        """Return the results of columns at positions ``first``, ``first`` + 1, ….

        The pass has ``count`` sequences, which are the same text.
        """
        attend = backend.prepare(
            table_1J.expand(count, -1).contiguous(),
            torch.full((count,), first + COLUMNS, dtype=torch.int32, device=device),
            num_queries=COLUMNS,
            num_pages=num_pages + 1,
            is_causal=True,
        )
        queries_QHE = queries_SHE[first : first + COLUMNS]
        queries_BQHE = queries_QHE.expand(count, -1, -1, -1).contiguous()
        found_BQHE, _ = attend(queries_BQHE, keys_YCGE, values_YCGE)
        return found_BQHE[-1]

    wrong = [
        f"position {position} in column {column}"
        for position in positions
        for column in range(1, COLUMNS)
        if not torch.equal(attended(position)[0], attended(position - column)[column])
    ]
    wrong += [
        f"position {position} beside {NUM_SEQUENCES - 1} sequences"
        for position in positions
        if not torch.equal(attended(position), attended(position, NUM_SEQUENCES))
    ]
    assert not wrong, f"{backend.name} has other bits at {', '.join(wrong[:8])}"
    return {"positions": len(positions), "columns": COLUMNS, "sequences": NUM_SEQUENCES}


def _compare(
    backend: PagedAttention,
    environment: Environment,
    names: Sequence[str],
    figures: dict[str, Figure],
) -> None:
    """Compare the named cases; all that differ by more than the tolerance are reported."""
    dtype = torch.bfloat16 if environment.is_cuda else torch.float32
    cases = paged_cases(backend.block_size)
    wrong, worst = [], 0.0
    for num_cases, name in enumerate(names, 1):
        difference = compare_paged(backend, cases[name], dtype, environment.target_device)
        largest = max(difference.out, difference.log_sum_exp)
        worst = max(worst, largest)
        figures |= {"cases": num_cases, "largest_difference": worst}
        if largest > TOLERANCES[dtype]:
            wrong.append(f"{name} by {largest:.3g}")
    assert not wrong, (
        f"{backend.name} differs in {len(wrong)} of {len(names)} cases "
        f"(tolerance {TOLERANCES[dtype]}): {'; '.join(wrong)}"
    )
