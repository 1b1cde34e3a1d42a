"""The kernels of the engine torch against the formula, and partial results against whole ones."""

import pytest
import torch
from torch import Tensor

from ssd.engine.attention.cpu import attend, attend_whole, merge_partials

B, G, U, S, E = 2, 2, 6, 32, 8
WIDTH = 8
"""Entries of a part. Each query sees the first one."""


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a mask that leaves some column of each part of a row open."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, G, U, E), (B, S, G, E), (B, S, G, E))
    queries, keys, values = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    is_masked_B1US = torch.rand((B, 1, U, S), generator=generator) < 0.5
    is_masked_B1US[..., ::WIDTH] = False
    mask_B1US = torch.zeros(is_masked_B1US.shape, dtype=dtype)
    return queries, keys, values, mask_B1US.masked_fill(is_masked_B1US, -torch.inf)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_attention_equals_the_formula_in_float64(dtype: torch.dtype, tolerance: float) -> None:
    queries, keys, values, mask = tensors(dtype)
    out, mass = attend(queries, keys, values, mask)
    whole = attend_whole(queries, keys, values, mask)
    keys_BGSE, values_BGSE = keys.double().transpose(1, 2), values.double().transpose(1, 2)
    scores = queries.double() @ keys_BGSE.transpose(2, 3) * E**-0.5 + mask.double()
    expected = scores.softmax(-1) @ values_BGSE
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(mass.double(), scores.logsumexp(-1), atol=tolerance, rtol=0)
    assert (out.dtype, whole.dtype, mass.dtype) == (dtype, dtype, torch.float32)


def merge(*parts: tuple[Tensor, Tensor]) -> Tensor:
    outs, masses = zip(*parts, strict=True)
    return merge_partials(torch.stack(outs), torch.stack(masses))


def test_merged_parts_equal_attention_to_all_and_parts_without_mass_change_no_bit() -> None:
    queries, keys, values, mask = tensors(torch.float32)
    parts = [
        attend(queries, keys[:, part], values[:, part], mask[..., part])
        for part in (slice(first, first + WIDTH) for first in range(0, S, WIDTH))
    ]
    merged = merge(*parts)
    whole, _ = attend(queries, keys, values, mask)
    torch.testing.assert_close(merged, whole, atol=1e-6, rtol=0)
    nothing = (torch.randn(B, G, U, E), torch.full((B, G, U), -torch.inf))
    for count in (1, 3, 20):
        assert torch.equal(merge(*parts, *[nothing] * count), merged)
        assert torch.equal(merge(*[nothing] * count, *parts), merged)
    assert torch.equal(merge(parts[0], nothing), parts[0][0])
