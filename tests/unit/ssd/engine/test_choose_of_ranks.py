"""The tokens that ranks choose together are those of one rank."""

import pytest
import torch
from tests.ranks import on_ranks
from torch import Tensor

from ssd.engine.parallel.group import RankGroup
from ssd.engine.rank_loop import choose_of_ranks
from ssd.engine.sampling.keyed import NoiseKeys, best_of_keys, choose_of_keys
from ssd.types import NO_TOKEN

sizes = pytest.mark.parametrize("size", [2, 4])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def keys_of(temperatures_R: Tensor) -> NoiseKeys:
    rows = len(temperatures_R)
    number_R = torch.arange(rows)
    return NoiseKeys(number_R * 977 - 3, torch.zeros_like(number_R), number_R + 5, temperatures_R)


def chosen(logits_RV: Tensor, keys: NoiseKeys, size: int, *, is_warm: bool) -> Tensor:
    """The tokens that ranks choose; all ranks have the same ones."""
    width = logits_RV.shape[1] // size

    def run(group: RankGroup) -> Tensor:
        first = group.shard.rank * width
        own_RV = logits_RV[:, first : first + width]
        return choose_of_ranks(*best_of_keys(own_RV, keys, is_warm=is_warm, first_id=first), group)

    found = on_ranks(size, run)
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


@sizes
def test_a_tie_between_ranks_goes_to_the_lowest_id(size: int) -> None:
    logits_RV = torch.zeros(3, 16)
    logits_RV[0, [7, 12]] = 1.0
    logits_RV[1, [15, 11, 9]] = 2.0
    found_R = chosen(logits_RV, keys_of(torch.zeros(3)), size, is_warm=False)
    assert found_R.tolist() == [7, 9, 0]


@sizes
@pytest.mark.parametrize("is_warm", [True, False])
def test_a_row_that_is_not_finite_on_one_rank_has_no_token(size: int, *, is_warm: bool) -> None:
    logits_RV = random(5, 16)
    logits_RV[0, 13] = torch.nan
    logits_RV[1, 2] = torch.inf
    logits_RV[2] = -torch.inf
    logits_RV[3, 4:] = -torch.inf
    keys = keys_of(torch.ones(5) if is_warm else torch.zeros(5))
    found_R = chosen(logits_RV, keys, size, is_warm=is_warm)
    assert torch.equal(found_R, choose_of_keys(logits_RV, keys, is_warm=is_warm))
    assert found_R[:3].tolist() == [NO_TOKEN] * 3
    assert found_R[3] < 4
