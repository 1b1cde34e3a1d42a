"""Every backend against the reference, and partial results against whole ones."""

import pytest
import torch
from torch import Tensor

from ssd.engine.attention.backend import BACKENDS, AttentionBackend, make_backend
from ssd.engine.attention.merge import merge_partials
from ssd.engine.attention.reference import ReferenceAttention
from ssd.errors import SettingsError

B, G, U, S, E = 2, 2, 6, 32, 8
Partial = tuple[Tensor, Tensor]


def tensors(dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a mask that leaves some column of each row open."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, G, U, E), (B, S, G, E), (B, S, G, E))
    queries, keys, values = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    is_masked_B1US = torch.rand((B, 1, U, S), generator=generator) < 0.5
    is_masked_B1US[..., 3] = False
    mask_B1US = torch.zeros(is_masked_B1US.shape, dtype=dtype).masked_fill(
        is_masked_B1US, -torch.inf
    )
    return queries, keys, values, mask_B1US


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_backend_equals_the_formula_in_float64(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    queries, keys, values, mask = tensors(dtype, 1)
    out, mass = make_backend(name).attend(queries, keys, values, mask)
    keys_BGSE, values_BGSE = keys.double().transpose(1, 2), values.double().transpose(1, 2)
    scores = queries.double() @ keys_BGSE.transpose(2, 3) * E**-0.5 + mask.double()
    torch.testing.assert_close(
        out.double(), scores.softmax(-1) @ values_BGSE, atol=tolerance, rtol=0
    )
    torch.testing.assert_close(mass.double(), scores.logsumexp(-1), atol=tolerance, rtol=0)
    assert out.dtype == dtype
    assert mass.dtype == torch.float32


@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_whole_attention_equals_chunked_attention(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    queries, keys, values, mask = tensors(dtype, 3)
    backend = make_backend(name)
    out, _ = backend.attend(queries, keys, values, mask)
    whole = backend.attend_whole(queries, keys, values, mask)
    assert whole.dtype == dtype
    torch.testing.assert_close(whole, out, atol=tolerance, rtol=0)


def attend_by_parts(backend: AttentionBackend, width: int) -> list[Partial]:
    queries, keys, values, mask = tensors(torch.float32, 2)
    mask[..., ::width] = 0.0
    return [
        backend.attend(
            queries,
            keys[:, first : first + width],
            values[:, first : first + width],
            mask[..., first : first + width],
        )
        for first in range(0, S, width)
    ]


def merge(parts: list[Partial]) -> Tensor:
    return merge_partials(
        torch.stack([out for out, _ in parts]), torch.stack([mass for _, mass in parts])
    )


@pytest.mark.parametrize("width", [4, 8, 16])
def test_merged_parts_equal_attention_over_all_entries(width: int) -> None:
    parts = attend_by_parts(ReferenceAttention(), width)
    queries, keys, values, mask = tensors(torch.float32, 2)
    mask[..., ::width] = 0.0
    whole, _ = ReferenceAttention().attend(queries, keys, values, mask)
    torch.testing.assert_close(merge(parts), whole, atol=1e-6, rtol=0)


def test_parts_without_mass_change_no_bit_at_any_place() -> None:
    parts = attend_by_parts(make_backend("cpu"), 8)
    expected = merge(parts)
    nothing = (torch.randn(B, G, U, E), torch.full((B, G, U), -torch.inf))
    for count in (1, 3, 20):
        assert torch.equal(merge([*parts, *[nothing] * count]), expected)
        assert torch.equal(merge([*[nothing] * count, *parts]), expected)
    assert torch.equal(merge([parts[0], nothing]), parts[0][0])


def test_an_unknown_backend_is_refused_with_the_known_names() -> None:
    with pytest.raises(SettingsError, match=r"'flash' is not one of cpu, reference"):
        make_backend("flash")
