from dataclasses import replace

import pytest
import torch
from tools.distill.evaluate import tokens_per_round
from tools.distill.model import Shape, TrainableLlama
from tools.distill.train import mixed_batches, sample_windows
from tools.distill.training import (
    Recipe,
    agreement_loss,
    divergence,
    learn,
    rate_factor,
    teacher_loss,
    text_loss,
    windows,
)
from torch import Tensor

SHAPE = Shape(
    vocab_size=64, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, mlp_width=32
)
RECIPE = Recipe(
    num_steps=6,
    batch_size=4,
    length=16,
    adam_rate=1e-2,
    muon_rate=1e-2,
    warmup_steps=2,
    compiled=False,
)
STREAM_S = torch.arange(600) % 64


def fresh_model(seed: int) -> TrainableLlama:
    model = TrainableLlama(SHAPE)
    model.initialise(torch.Generator().manual_seed(seed))
    return model


def train(seed: int) -> tuple[TrainableLlama, float]:
    generator = torch.Generator().manual_seed(seed)
    model = fresh_model(seed)
    batches = windows(STREAM_S, RECIPE, generator)
    return model, learn(model, RECIPE, batches, text_loss(model), title="tiny").loss


def weights(model: TrainableLlama) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_same_seed_trains_the_same_weights() -> None:
    first, first_loss = train(7)
    second, second_loss = train(7)
    assert torch.equal(weights(first), weights(second))
    assert first_loss == second_loss
    assert not torch.equal(weights(first), weights(train(8)[0]))


def test_every_parameter_moves_and_the_loss_falls() -> None:
    before = fresh_model(7)
    after, loss = train(7)
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        assert not torch.equal(old, new)
    with torch.no_grad():
        untrained = float(text_loss(before)(next(windows(STREAM_S, RECIPE, torch.Generator()))))
    assert loss < untrained


def test_a_student_moves_towards_the_distribution_of_its_teacher() -> None:
    teacher, student = fresh_model(1), fresh_model(2)
    with torch.no_grad():
        teacher.model.embed_tokens.weight.mul_(20.0)
    recipe = replace(RECIPE, num_steps=20)
    loss_of = teacher_loss(student, teacher)
    batch_BS = next(windows(STREAM_S, recipe, torch.Generator()))
    before = float(loss_of(batch_BS).detach())
    teacher_before = weights(teacher)
    learn(student, recipe, windows(STREAM_S, recipe, torch.Generator()), loss_of, title="tiny")
    assert float(loss_of(batch_BS).detach()) < 0.8 * before
    assert torch.equal(weights(teacher), teacher_before)


def test_divergence_is_zero_for_equal_distributions_and_correct_for_known_ones() -> None:
    logits_BSV = torch.tensor([[[0.0, 0.0]]])
    other_BSV = torch.tensor([[[0.0, torch.log(torch.tensor(3.0))]]])
    assert divergence(logits_BSV, logits_BSV).item() == pytest.approx(0.0, abs=1e-6)
    wanted = 0.5 * torch.log(torch.tensor(4 / 3)).item()
    assert divergence(logits_BSV, other_BSV).item() == pytest.approx(
        0.5 * torch.log(torch.tensor(2.0)).item() + 0.5 * torch.log(torch.tensor(2 / 3)).item()
    )
    assert divergence(logits_BSV, other_BSV).item() == pytest.approx(wanted)


def test_windows_are_slices_of_the_text_and_an_epoch_repeats_none() -> None:
    stream_S = torch.arange(1000)
    batches = windows(stream_S, RECIPE, torch.Generator().manual_seed(1))
    rows = torch.cat([next(batches) for _ in range(15)])
    assert torch.equal(rows - rows[:, :1], torch.arange(17).expand(60, 17))
    assert len(set(rows[:, 0].tolist())) == 60


def test_the_rate_rises_to_its_peak_and_falls_to_a_hundredth() -> None:
    recipe = replace(RECIPE, num_steps=100, warmup_steps=10)
    factors = [rate_factor(step, recipe) for step in range(100)]
    assert factors[9] == pytest.approx(1.0)
    assert max(factors) == pytest.approx(1.0)
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] < 0.02


def test_half_of_a_distilling_batch_is_the_targets_own_text() -> None:
    sampled_BS = -torch.arange(1, 11)[:, None].expand(10, 17)
    batch_BS = next(mixed_batches(STREAM_S, sampled_BS, RECIPE, torch.Generator()))
    assert batch_BS.shape == (4, 17)
    assert (batch_BS[:2] >= 0).all()
    assert (batch_BS[2:] < 0).all()


def test_a_sampled_window_starts_with_its_prompt_and_is_greedy_at_temperature_0() -> None:
    model = fresh_model(4).eval()
    prompts_BS = torch.tensor([[1, 2, 3]]).repeat(3, 1)
    tokens_BS = sample_windows(model, prompts_BS, 8, torch.Generator().manual_seed(0))
    assert tokens_BS.shape == (3, 8)
    assert torch.equal(tokens_BS[:, :3], prompts_BS)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        greedy_S = model(tokens_BS[2:, :-1])[0, 2:].argmax(dim=-1)
    assert torch.equal(tokens_BS[2, 3:], greedy_S)


def test_logits_with_and_without_stored_keys_are_equal() -> None:
    model = fresh_model(4).eval()
    tokens_BS = torch.arange(14).view(2, 7)
    with torch.no_grad():
        whole_BSV = model(tokens_BS)
        first_BSV, past = model.extend(tokens_BS[:, :3], None)
        second_BSV, past = model.extend(tokens_BS[:, 3:6], past)
        third_BSV, _ = model.extend(tokens_BS[:, 6:], past)
    found_BSV = torch.cat((first_BSV, second_BSV, third_BSV), dim=1)
    torch.testing.assert_close(found_BSV, whole_BSV)


@pytest.mark.parametrize(
    ("agrees", "lookahead", "wanted"),
    [
        ([True] * 10, 3, 4.0),
        ([False] * 10, 3, 1.0),
        ([True, False] * 10, 3, 2.0),
        ([True, True, False, True, True, True, True, False], 3, 3.5),
    ],
)
def test_tokens_per_round_counts_accepted_runs_and_the_bonus(
    agrees: list[bool], lookahead: int, wanted: float
) -> None:
    assert tokens_per_round(torch.tensor([agrees]), lookahead) == wanted


def test_a_pair_that_learns_to_agree_diverges_less_and_both_models_move() -> None:
    target, draft = fresh_model(1), fresh_model(2)
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(20.0)
    recipe = replace(RECIPE, num_steps=20)
    batch_BS = next(windows(STREAM_S, recipe, torch.Generator()))
    apart = teacher_loss(draft, target)
    before = float(apart(batch_BS).detach())
    old_target, old_draft = weights(target), weights(draft)
    loss_of = agreement_loss(target, draft, 1.0, 2)
    batches = windows(STREAM_S, recipe, torch.Generator())
    learn(torch.nn.ModuleList((target, draft)), recipe, batches, loss_of, title="tiny")
    assert float(apart(batch_BS).detach()) < 0.8 * before
    assert not torch.equal(weights(target), old_target)
    assert not torch.equal(weights(draft), old_draft)


def test_only_rows_of_text_contribute_to_the_text_loss() -> None:
    model = fresh_model(1)
    batch_BS = next(windows(STREAM_S, RECIPE, torch.Generator()))
    with torch.no_grad():
        agreed = float(agreement_loss(model, model, 1.0, 2)(batch_BS))
        assert agreed == pytest.approx(float(text_loss(model)(batch_BS[:2])), abs=1e-3)
