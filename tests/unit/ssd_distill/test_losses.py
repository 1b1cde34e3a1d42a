import pytest
import torch

from ssd_distill.losses import agreement, divergence, log_probabilities, teacher_loss


def agreed(pair_2BSV: torch.Tensor, temperature: float = 1.0) -> float:
    log_p_RV, log_q_RV = (log_probabilities(each) for each in pair_2BSV)
    return float(agreement(log_p_RV, log_q_RV, temperature))


def log_3() -> torch.Tensor:
    return torch.log(torch.tensor(3.0))


def test_divergence_is_zero_for_equal_distributions_and_correct_for_known_ones() -> None:
    logits_BSV = torch.tensor([[[0.0, 0.0]]])
    other_BSV = torch.tensor([[[0.0, log_3()]]])
    assert divergence(logits_BSV, logits_BSV).item() == pytest.approx(0.0, abs=1e-6)
    wanted = 0.5 * torch.log(torch.tensor(4 / 3)).item()
    assert divergence(logits_BSV, other_BSV).item() == pytest.approx(wanted)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_agreement_is_the_share_of_equal_choices_with_the_same_noise(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    pairs_2BSV = 2.0 * torch.randn(2, 2, 3, 20, generator=generator)
    noise_NBSV = -torch.empty(20_000, 2, 3, 20).exponential_(generator=generator).log()
    wanted, chosen = ((each / temperature + noise_NBSV).argmax(-1) for each in pairs_2BSV)
    share = (wanted == chosen).float().mean().item()
    # 120,000 choices have a standard error below .0015.
    assert agreed(pairs_2BSV, temperature) == pytest.approx(share, abs=0.006)


def test_the_agreement_of_many_tokens_is_that_of_the_likely_ones() -> None:
    generator = torch.Generator().manual_seed(4)
    wanted_BSV = 6.0 * torch.randn(1, 64, 300, generator=generator)
    pair_2BSV = torch.stack((wanted_BSV, wanted_BSV + torch.randn(1, 64, 300, generator=generator)))
    p_RV, q_RV = (log_probabilities(each).exp() for each in pair_2BSV)
    ratios_RVV = torch.maximum(p_RV[:, None] / p_RV[..., None], q_RV[:, None] / q_RV[..., None])
    exact = float((1.0 / ratios_RVV.sum(-1)).sum(-1).mean())
    assert 0.5 < exact < 0.9
    assert agreed(pair_2BSV) == pytest.approx(exact, abs=0.005)


def test_tokens_beyond_the_likely_ones_count_as_one_that_is_never_agreed_on() -> None:
    flat_BSV = torch.zeros(1, 1, 100)
    assert agreed(torch.stack((flat_BSV, flat_BSV))) == pytest.approx(0.32)


def test_equal_distributions_agree_always() -> None:
    logits_BSV = 5.0 * torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(5))
    assert agreed(torch.stack((logits_BSV, logits_BSV))) == pytest.approx(1.0, abs=0.01)


def test_the_loss_is_divergence_less_agreement() -> None:
    generator = torch.Generator().manual_seed(6)
    pair_2BSV = 2.0 * torch.randn(2, 1, 5, 20, generator=generator)
    wanted_BSV, found_BSV = pair_2BSV
    loss = teacher_loss(lambda _: found_BSV, lambda _: wanted_BSV)(
        torch.zeros(1, 6, dtype=torch.int64)
    )
    agreement_of_both = (agreed(pair_2BSV) + agreed(pair_2BSV, 0.5)) / 2
    divergence_of_both = float(divergence(wanted_BSV, found_BSV))
    assert float(loss) == pytest.approx(0.3 * divergence_of_both - agreement_of_both)


def test_a_target_without_doubt_gives_a_finite_gradient_towards_its_choice() -> None:
    certain_BSV = torch.zeros(1, 2, 100)
    certain_BSV[..., 7] = 200.0
    student_BSV = torch.zeros(1, 2, 100, requires_grad=True)
    pair = log_probabilities(certain_BSV), log_probabilities(student_BSV)
    torch.autograd.backward(agreement(*pair, 0.5))
    assert student_BSV.grad is not None
    assert student_BSV.grad.isfinite().all()
    assert (student_BSV.grad[..., 7] > 0).all()
