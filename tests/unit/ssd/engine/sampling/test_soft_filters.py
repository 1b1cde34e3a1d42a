import numpy as np
import pytest
import torch

from ssd.engine.sampling.logits import Filters, filtered
from ssd.engine.sampling.soft_filters import FACTOR, SoftFilters, ranks_of

V = 4096
SMALL_V = 50
ALL = np.arange(3)


def logits(num_ids: int = V, rows: int = 3) -> torch.Tensor:
    return torch.randn((rows, num_ids), generator=torch.Generator().manual_seed(5)) * 3


def kept(logits_RV: torch.Tensor, temperature: float, top_k: int, min_p: float) -> torch.Tensor:
    """Return which tokens a target keeps."""
    count = len(logits_RV)
    of_rows = Filters.on(
        "cpu",
        np.full(count, temperature, dtype=np.float32),
        np.full(count, top_k),
        np.ones(count),
        np.full(count, min_p, dtype=np.float32),
    )
    return filtered(logits_RV, of_rows) > -torch.inf


def of(temperature: float, top_k: int, min_p: float) -> SoftFilters:
    filters = SoftFilters(3, "cpu")
    for slot in range(3):
        filters.assign(slot, temperature, top_k, min_p)
    return filters


@pytest.mark.parametrize(
    ("num_ids", "top_k", "min_p"), [(SMALL_V, 7, 0.0), (SMALL_V, 7, 0.3), (V, 0, 0.05)]
)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_exactly_the_tokens_that_the_target_removes_are_lowered(
    num_ids: int, top_k: int, min_p: float, temperature: float
) -> None:
    logits_RV = logits(num_ids)
    kept_RV = kept(logits_RV, temperature, top_k, min_p)
    lowest_R1 = logits_RV.masked_fill(~kept_RV, torch.inf).amin(dim=1, keepdim=True)
    found_RV = of(temperature, top_k, min_p).lowered(logits_RV, ALL)
    assert torch.equal(found_RV[kept_RV], logits_RV[kept_RV])
    assert (found_RV < logits_RV)[~kept_RV].all()
    if top_k and not min_p:
        expected_RV = logits_RV - FACTOR * (lowest_R1 - logits_RV)
        torch.testing.assert_close(found_RV[~kept_RV], expected_RV[~kept_RV])


def test_about_k_tokens_of_a_large_vocabulary_keep_their_logits() -> None:
    logits_RV = logits(rows=200)
    filters = SoftFilters(1, "cpu")
    for top_k in (1, 5, 20, 50, 100):
        filters.assign(0, 1.0, top_k, 0.0)
        found_RV = filters.lowered(logits_RV, np.zeros(200, dtype=np.int64))
        num_kept = (found_RV == logits_RV).sum(dim=1).double().mean().item()
        assert num_kept == pytest.approx(top_k, rel=0.15, abs=1)


def test_a_row_without_a_filter_has_the_same_bits() -> None:
    logits_RV = logits()
    logits_RV[1, :9] = -torch.inf
    filters = SoftFilters(3, "cpu")
    assert filters.lowered(logits_RV, ALL) is logits_RV
    filters.assign(0, 1.0, 20, 0.0)
    filters.assign(2, 1.0, 0, 0.1)
    before_RV = logits_RV.clone()
    found_RV = filters.lowered(logits_RV, ALL)
    assert torch.equal(logits_RV, before_RV)
    assert torch.equal(found_RV[1], logits_RV[1])
    assert not torch.equal(found_RV[0], logits_RV[0])
    assert not torch.equal(found_RV[2], logits_RV[2])


@pytest.mark.parametrize(
    ("temperature", "top_k", "min_p"),
    [(1.0, 0, 0.0), (0.0, 20, 0.5), (1.0, V, 0.0), (1.0, 2**31 - 1, 0.0)],
)
def test_filters_that_remove_nothing_change_no_bit(
    temperature: float, top_k: int, min_p: float
) -> None:
    logits_RV = logits()
    assert torch.equal(of(temperature, top_k, min_p).lowered(logits_RV, ALL), logits_RV)


def test_a_released_slot_has_no_filter() -> None:
    filters = of(1.0, 20, 0.1)
    for slot in range(3):
        filters.release(slot)
    assert filters.of_rows(ALL, V) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, V + 10])
def test_a_row_that_is_not_finite_stays_so(value: float, column: int) -> None:
    logits_RV = logits(V + 11)
    logits_RV[1, column] = value
    found_RV = of(1.0, 20, 0.1).lowered(logits_RV, ALL)
    best_R = found_RV.numpy().argmax(axis=1)
    assert found_RV[ALL, best_R].isfinite().tolist() == [True, False, True]


def test_ranks_are_those_of_the_expected_number_of_groups() -> None:
    assert ranks_of(np.array([0, 1, 20, 1000, V + 1]), V).tolist() == [0, 1, 17, 0, 0]
    assert ranks_of(np.array([0, 1, 20, 49, 50]), SMALL_V).tolist() == [0, 1, 20, 49, 0]
