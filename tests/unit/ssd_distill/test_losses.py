import pytest
import torch

from ssd_distill.losses import agreement, divergence, log_probabilities, teacher_loss
from ssd_distill.training import LossFunction


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


def test_improbable_tokens_hardly_change_the_agreement() -> None:
    generator = torch.Generator().manual_seed(4)
    pairs_2BSV = 4.0 * torch.randn(2, 1, 64, 500, generator=generator)
    noise_NSV = -torch.empty(2_000, 64, 500).exponential_(generator=generator).log()
    wanted, chosen = ((each[0] + noise_NSV).argmax(-1) for each in pairs_2BSV)
    share = (wanted == chosen).float().mean().item()
    assert agreed(pairs_2BSV) == pytest.approx(share, abs=0.01)


def test_equal_distributions_agree_always() -> None:
    logits_BSV = 5.0 * torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(5))
    assert agreed(torch.stack((logits_BSV, logits_BSV))) == pytest.approx(1.0, abs=0.01)


def test_a_target_without_doubt_gives_a_finite_gradient() -> None:
    certain_BSV = torch.zeros(1, 2, 100)
    certain_BSV[..., 7] = 200.0
    student_BSV = torch.zeros(1, 2, 100, requires_grad=True)
    loss_of: LossFunction = teacher_loss(lambda _: student_BSV, lambda _: certain_BSV)
    torch.autograd.backward(loss_of(torch.zeros(1, 3, dtype=torch.int64)))
    assert student_BSV.grad is not None
    assert student_BSV.grad.isfinite().all()
    assert (student_BSV.grad[..., 7] < 0).all(), "its probability is to rise"
