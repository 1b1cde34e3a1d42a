"""A kernel on pages against attention to each sequence on its own, on a CPU and on a GPU.

The expected values do not come from the code under test: torch's own attention over the contiguous
keys of one sequence, and its log-sum-exp, in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ssd.engine.attention.paged import PagedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """The shape of one comparison."""

    lengths: tuple[int, ...]
    """Positions of each sequence; 0 is a padding sequence, whose block table contains zeros."""
    num_queries: int
    is_causal: bool
    group: int = 4
    """Query heads of a key/value head."""
    num_kv_heads: int = 2
    head_size: int = 64


def paged_cases(page: int) -> dict[str, PagedCase]:
    """Return named cases for pages of ``page`` slots."""
    around = (0, 1, page - 1, page, page + 1, 2 * page + 3, 3 * page, 0)
    many = tuple(7 + 5 * index for index in range(32))
    return {
        "one query": PagedCase(lengths=around, num_queries=1, is_causal=True),
        "a verify around page boundaries": PagedCase(
            lengths=(7, *around[2:]), num_queries=7, is_causal=True
        ),
        "queries before the first position": PagedCase(
            lengths=(3, 1), num_queries=7, is_causal=True
        ),
        "a trunk": PagedCase(lengths=around, num_queries=24, is_causal=False),
        "a trunk, 192 rows of a head": PagedCase(
            lengths=around, num_queries=24, is_causal=False, group=8, num_kv_heads=1
        ),
        "a chunk of a prompt": PagedCase(
            lengths=(300, 2 * page + 301, 0), num_queries=300, is_causal=True, num_kv_heads=1
        ),
        "8192 positions": PagedCase(
            lengths=(8192, 4095, 8), num_queries=8, is_causal=True, group=2
        ),
        "a trunk of 8192 positions": PagedCase(
            lengths=(8192, 1), num_queries=8, is_causal=False, group=2
        ),
        "32 sequences": PagedCase(
            lengths=many, num_queries=7, is_causal=True, head_size=32, group=2, num_kv_heads=1
        ),
        **{
            f"heads of 128, {group} of a key head": PagedCase(
                lengths=(2 * page + 301, 600, 0),
                num_queries=7,
                is_causal=True,
                group=group,
                head_size=128,
            )
            for group in (4, 8)
        },
        **{
            f"{group} query heads of a key head": PagedCase(
                lengths=(40, 3 * page - 1), num_queries=7, is_causal=True, group=group
            )
            for group in (1, 2, 3, 8)
        },
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest absolute differences; NaN or infinite if a value is."""

    out: float
    log_sum_exp: float


def compare_paged(
    backend: PagedAttention, case: PagedCase, dtype: torch.dtype, device: str
) -> Difference:
    """Compare a backend with attention to each sequence on its own.

    Pages are in random order, and slots that belong to no sequence contain random values.
    """
    generator = torch.Generator().manual_seed(1)
    heads = case.num_kv_heads * case.group
    entry = (case.num_kv_heads, case.head_size)
    page = backend.block_size
    num_blocks = [-(-length // page) for length in case.lengths]
    num_pages = 1 + sum(num_blocks) + 3
    shape = (len(case.lengths), case.num_queries, heads, case.head_size)
    queries_BQHE = torch.randn(shape, generator=generator).to(device, dtype)
    keys_YCGE, values_YCGE = (
        torch.randn((2, num_pages, page, *entry), generator=generator).to(device, dtype).unbind(0)
    )
    ids_Y = torch.randperm(num_pages - 1, generator=generator, dtype=torch.int32) + 1
    block_tables_BJ = torch.zeros((len(num_blocks), max(*num_blocks, 1) + 1), dtype=torch.int32)
    for row_J, taken, count in zip(block_tables_BJ, _starts(num_blocks), num_blocks, strict=True):
        row_J[:count] = ids_Y[taken : taken + count]
    block_tables_BJ = block_tables_BJ.to(device)
    attend = backend.prepare(
        block_tables_BJ,
        torch.tensor(case.lengths, dtype=torch.int32).to(device),
        num_queries=case.num_queries,
        num_pages=num_pages,
        is_causal=case.is_causal,
    )
    out_BQHE, mass_BHQ = attend(queries_BQHE, keys_YCGE, values_YCGE)
    assert out_BQHE.shape == queries_BQHE.shape
    assert out_BQHE.dtype == dtype
    assert mass_BHQ.dtype == torch.float32
    worst_out = worst_mass = 0.0
    for index, length in enumerate(case.lengths):
        table_J = block_tables_BJ[index]
        expected_QHE, expected_HQ = attend_one(
            queries_BQHE[index],
            keys_YCGE[table_J].flatten(0, 1)[:length],
            values_YCGE[table_J].flatten(0, 1)[:length],
            is_causal=case.is_causal,
        )
        worst_out = max(worst_out, _largest(out_BQHE[index] - expected_QHE))
        # Equal infinities agree, and their difference is NaN.
        same_HQ = mass_BHQ[index] == expected_HQ
        if case.is_causal:
            same_HQ |= (expected_HQ == -torch.inf) & mass_BHQ[index].isinf()
        worst_mass = max(worst_mass, _largest((mass_BHQ[index] - expected_HQ)[~same_HQ]))
    return Difference(worst_out, worst_mass)


def attend_one(
    queries_QHE: Tensor, keys_SGE: Tensor, values_SGE: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return attention [Q, H, E] and log-sum-exp [H, Q] of one sequence, in float64."""
    queries, heads, size = queries_QHE.shape
    num_entries = len(keys_SGE)
    visible_QS = torch.ones((queries, num_entries), dtype=torch.bool, device=queries_QHE.device)
    if is_causal:
        visible_QS = visible_QS.tril(num_entries - queries)
    group = heads // keys_SGE.shape[1]
    queries_HQE = queries_QHE.double().transpose(0, 1)
    keys_HSE, values_HSE = (
        tensor.double().repeat_interleave(group, dim=1).transpose(0, 1)
        for tensor in (keys_SGE, values_SGE)
    )
    out_HQE = functional.scaled_dot_product_attention(
        queries_HQE[None], keys_HSE[None], values_HSE[None], attn_mask=visible_QS
    )[0]
    # The result of a fully masked row is not specified.
    sees_Q = visible_QS.any(dim=1)
    out_HQE = out_HQE.where(sees_Q[:, None], 0.0)
    scores_HQS = queries_HQE @ keys_HSE.mT * size**-0.5
    scores_HQS = scores_HQS.masked_fill(~visible_QS, -torch.inf)
    return out_HQE.transpose(0, 1), scores_HQS.logsumexp(dim=-1)


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:index]) for index in range(len(counts))]


def _largest(difference: Tensor) -> float:
    """Return the largest absolute value; NaN counts as infinite."""
    return float(difference.abs().nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0
