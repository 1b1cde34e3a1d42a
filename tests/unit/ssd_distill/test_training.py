from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_bench.sampling.model import Model
from ssd_distill.losses import teacher_loss
from ssd_distill.models import logits_of
from ssd_distill.training import (
    LossFunction,
    Recipe,
    Training,
    mixed_batches,
    rate_factor,
    windows,
)
from ssd_distill.written import write_windows

Fresh = Callable[[int], Any]
RECIPE = Recipe(
    num_steps=20, batch_size=4, length=16, adam_rate=1e-2, muon_rate=1e-2, warmup_steps=2
)
STREAM_S = torch.arange(600) % 64


def weights(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def pair(fresh_model: Fresh) -> tuple[Any, Any, LossFunction]:
    """A student and a teacher whose distributions differ."""
    teacher, student = fresh_model(1), fresh_model(2)
    with torch.no_grad():
        teacher.model.embed_tokens.weight.mul_(20.0)
    return student, teacher, teacher_loss(logits_of(student), logits_of(teacher))


def run(training: Training, loss_of: LossFunction, stop_after: int = 1000) -> None:
    def on_step() -> None:
        if training.num_done == stop_after:
            raise KeyboardInterrupt

    batches = windows(STREAM_S, RECIPE, torch.Generator().manual_seed(7))
    training.run(batches, loss_of, on_step)


def test_a_student_moves_towards_the_distribution_of_its_teacher(fresh_model: Fresh) -> None:
    student, teacher, loss_of = pair(fresh_model)
    batch_BS = next(windows(STREAM_S, RECIPE, torch.Generator()))
    before, old_teacher, old_student = (
        float(loss_of(batch_BS).detach()),
        weights(teacher),
        [parameter.detach().clone() for parameter in student.parameters()],
    )
    training = Training(student, RECIPE)
    run(training, loss_of)
    assert training.num_done == RECIPE.num_steps
    assert training.loss < before
    assert float(loss_of(batch_BS).detach()) < before - 0.1
    assert torch.equal(weights(teacher), old_teacher)
    for old, new in zip(old_student, student.parameters(), strict=True):
        assert not torch.equal(old, new)


@pytest.mark.parametrize("muon_rate", [0.0, 1e-2])
def test_a_restored_training_has_the_weights_of_one_without_interruption(
    fresh_model: Fresh, muon_rate: float
) -> None:
    recipe = replace(RECIPE, muon_rate=muon_rate)
    whole, _, loss_of = pair(fresh_model)
    run(Training(whole, recipe), loss_of)
    first, _, loss_of = pair(fresh_model)
    interrupted = Training(first, recipe)
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, loss_of, stop_after=7)
    state = {name: value.clone() for name, value in interrupted.state().items()}
    second, _, loss_of = pair(fresh_model)
    resumed = Training(second, recipe)
    resumed.restore(state)
    assert resumed.num_done == 7
    run(resumed, loss_of)
    assert torch.equal(weights(second), weights(whole))


def test_padding_of_the_vocabulary_has_no_logits(fresh_model: Fresh) -> None:
    tokens_BS = STREAM_S[:8].view(2, 4)
    logits_BSV = logits_of(fresh_model(1))(tokens_BS)
    assert torch.equal(logits_of(fresh_model(1), 60)(tokens_BS), logits_BSV[..., :60])


def test_windows_are_slices_of_the_text_and_an_epoch_repeats_none() -> None:
    stream_S = torch.arange(1000)
    batches = windows(stream_S, RECIPE, torch.Generator().manual_seed(1))
    rows = torch.cat([next(batches) for _ in range(15)])
    assert torch.equal(rows - rows[:, :1], torch.arange(17).expand(60, 17))
    assert len(set(rows[:, 0].tolist())) == 60


def test_a_text_of_one_window_is_repeated() -> None:
    batches = windows(torch.arange(17), RECIPE, torch.Generator().manual_seed(1))
    assert torch.equal(next(batches), torch.arange(17).expand(4, 17))


def test_the_rate_rises_to_its_peak_and_falls_to_a_hundredth() -> None:
    recipe = replace(RECIPE, num_steps=100, warmup_steps=10)
    factors = [rate_factor(step, recipe) for step in range(100)]
    assert factors[9] == pytest.approx(1.0)
    assert max(factors) == pytest.approx(1.0)
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] < 0.02


@pytest.mark.parametrize(("num_written", "half"), [(10, 2), (1, 2), (0, 0)])
def test_half_of_a_batch_is_the_targets_own_text(num_written: int, half: int) -> None:
    written_BS = -torch.arange(1, 1 + num_written)[:, None].expand(-1, 17)
    batch_BS = next(mixed_batches(STREAM_S, written_BS, RECIPE, torch.Generator()))
    assert batch_BS.shape == (4, 17)
    assert (batch_BS[: 4 - half] >= 0).all()
    assert (batch_BS[4 - half :] < 0).all()


def test_a_written_window_starts_with_its_prompt_and_is_greedy_at_temperature_0(
    fresh_model: Fresh,
) -> None:
    target = fresh_model(4).eval()
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(20.0)
    counts: list[int] = []
    tokens_BS = write_windows(
        Model(target, 60), STREAM_S[:60], (66, 17), 0, prefix=(9,), on_windows=counts.append
    )
    assert tokens_BS.shape == (66, 17)
    assert counts == [64, 2]
    assert int(tokens_BS.max()) < 60
    prompts_BS = tokens_BS[:64, :3]
    assert torch.equal(prompts_BS[:, 0], torch.full((64,), 9))
    assert torch.equal(prompts_BS[:, 2], prompts_BS[:, 1] + 1)
    with torch.no_grad():
        greedy_BS = logits_of(target, 60)(tokens_BS[2:64:3, :-1])[:, 2:].argmax(dim=-1)
    assert torch.equal(tokens_BS[2:64:3, 3:], greedy_BS)
