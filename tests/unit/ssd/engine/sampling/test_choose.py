import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.engine.sampling.choose import choose, choose_row, top_candidates
from ssd.types import NO_TOKEN

LOGITS_RV = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
NOISE_RV = torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0]])


def test_a_row_of_temperature_0_ignores_noise() -> None:
    assert choose(LOGITS_RV, torch.tensor([0.0, 1.0]), NOISE_RV).tolist() == [1, 0]


def test_rows_of_temperature_0_need_no_noise() -> None:
    assert choose(LOGITS_RV, torch.zeros(2), None).tolist() == [1, 1]


def test_temperature_divides_logits_and_not_noise() -> None:
    noise_RV = torch.tensor([[1.5, 0.0, 0.0]])
    assert choose(LOGITS_RV[:1], torch.tensor([1.0]), noise_RV).tolist() == [1]
    assert choose(LOGITS_RV[:1], torch.tensor([2.0]), noise_RV).tolist() == [0]


def test_ties_go_to_the_lowest_id() -> None:
    level_RV = torch.zeros((2, 5000))
    assert choose(level_RV, torch.tensor([0.0, 1.0]), torch.zeros((2, 5000))).tolist() == [0, 0]


def test_a_masked_token_is_never_chosen() -> None:
    logits_RV = torch.tensor([[-torch.inf, 0.0]])
    for temperature in (0.0, 0.3, 5.0):
        noise_RV = torch.tensor([[80.0, -3.0]])
        assert choose(logits_RV, torch.tensor([temperature]), noise_RV).tolist() == [1]
        ids_RM, scores_RM = top_candidates(logits_RV, torch.tensor([temperature]), noise_RV, 2)
        assert ids_RM.tolist() == [[1, 0]]
        assert scores_RM[0, 1] == -torch.inf


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_token_and_affects_no_other(
    number: float, temperature: float
) -> None:
    logits_RV = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, number], [-torch.inf] * 3])
    noise_RV = torch.zeros((3, 3)) if temperature else None
    chosen_R = choose(logits_RV, torch.full((3,), temperature), noise_RV)
    assert chosen_R.tolist() == [1, NO_TOKEN, NO_TOKEN]
    _, scores_RM = top_candidates(logits_RV, torch.full((3,), temperature), noise_RV, 2)
    assert scores_RM[:, 0].isfinite().tolist() == [True, False, False]


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]))
def test_the_first_candidate_is_the_token_chosen(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn((4, 9), generator=generator) * 3
    noise_RV = -torch.log(-torch.log(torch.rand((4, 9), generator=generator)))
    temperature_R = torch.full((4,), temperature)
    ids_RM, scores_RM = top_candidates(logits_RV, temperature_R, noise_RV, 4)
    assert ids_RM[:, 0].tolist() == choose(logits_RV, temperature_R, noise_RV).tolist()
    assert scores_RM.tolist() == scores_RM.sort(dim=1, descending=True).values.tolist()


def test_scores_are_log_probabilities_plus_tempered_noise_up_to_a_constant() -> None:
    ids_RM, scores_RM = top_candidates(LOGITS_RV, torch.tensor([0.0, 0.5]), NOISE_RV, 3)
    expected_RV = LOGITS_RV.log_softmax(-1) + torch.tensor([[0.0], [0.5]]) * NOISE_RV
    offset_RM = scores_RM - expected_RV.gather(1, ids_RM)
    torch.testing.assert_close(offset_RM, offset_RM[:, :1].expand(-1, 3))


def test_choices_with_gumbel_noise_have_the_softmax_distribution() -> None:
    """20,000 draws; the largest deviation of a frequency is within 4 standard errors."""
    generator = torch.Generator().manual_seed(3)
    noise_RV = -torch.log(-torch.log(torch.rand((20_000, 3), generator=generator)))
    chosen_R = choose(LOGITS_RV[:1].expand(20_000, -1), torch.full((20_000,), 0.8), noise_RV)
    law_V = (LOGITS_RV[0] / 0.8).softmax(0)
    frequency_V = torch.bincount(chosen_R, minlength=3) / 20_000
    error_V = (law_V * (1 - law_V) / 20_000).sqrt()
    assert ((frequency_V - law_V).abs() < 4 * error_V).all()


@pytest.mark.parametrize("count", [1, 3])
def test_the_requested_number_of_candidates_is_returned(count: int) -> None:
    ids_RM, scores_RM = top_candidates(LOGITS_RV, torch.zeros(2), None, count)
    assert ids_RM.shape == scores_RM.shape == (2, count)


def test_a_row_alone_has_the_choice_of_its_matrix() -> None:
    num_ids = 700
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.randn((9, num_ids), generator=generator)
    logits_RV[2, 3], logits_RV[4, 1] = torch.nan, torch.inf
    logits_RV[6] = -torch.inf
    logits_RV[7] = 0.5
    # The noise of a padded vocabulary has more columns.
    noise_RV = torch.randn((9, num_ids + 3), generator=generator)
    noise_RV[:, num_ids:] = 100.0
    temperature_R = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.0, 0.0, 0.0, 1.9, 0.3])
    scores_V = np.empty(num_ids + 1, dtype=np.float32)
    found = [
        choose_row(logits_V, temperature, noise_V if temperature else None, scores_V)
        for logits_V, noise_V, temperature in zip(
            logits_RV.numpy(), noise_RV.numpy(), temperature_R.tolist(), strict=True
        )
    ]
    assert found == choose(logits_RV, temperature_R, noise_RV[:, :num_ids]).tolist()
    assert found.count(NO_TOKEN) == 3
