from dataclasses import replace
from typing import Any

import pytest
import torch
from tools.distill.losses import agreement_loss, text_loss
from tools.distill.model import DRAFT
from torch import Tensor, nn

from ssd_distill.losses import divergence
from ssd_distill.models import logits_of, new_model
from ssd_distill.training import Recipe, Training, windows

CONFIG = DRAFT | {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "head_dim": 4}
RECIPE = Recipe(
    num_steps=20, batch_size=4, length=16, adam_rate=1e-2, muon_rate=1e-2, warmup_steps=2
)
STREAM_S = torch.arange(600) % 64


@pytest.fixture
def pair() -> tuple[Any, Any]:
    target, draft = (new_model(CONFIG, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(20.0)
    return target, draft


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_pair_that_learns_to_agree_diverges_less_and_both_models_move(
    pair: tuple[Any, Any],
) -> None:
    target, draft = pair
    batches = windows(STREAM_S, RECIPE, torch.Generator())
    batch_BS = next(batches)

    def apart() -> float:
        with torch.no_grad():
            return float(divergence(*(logits_of(model)(batch_BS) for model in pair)))

    before = apart()
    old = [weights(model) for model in pair]
    loss_of = agreement_loss(logits_of(target), logits_of(draft), 1.0, 2)
    Training(nn.ModuleList(pair), RECIPE).run(batches, loss_of, lambda: None)
    assert apart() < 0.8 * before
    for model, old_weights in zip(pair, old, strict=True):
        assert not torch.equal(weights(model), old_weights)


def test_only_rows_of_text_contribute_to_the_text_loss(pair: tuple[Any, Any]) -> None:
    model = logits_of(pair[0])
    batch_BS = next(windows(STREAM_S, RECIPE, torch.Generator()))
    with torch.no_grad():
        agreed = float(agreement_loss(model, model, 1.0, 2)(batch_BS))
        assert agreed == pytest.approx(float(text_loss(model)(batch_BS[:2])), abs=1e-3)


def test_text_is_learnt(pair: tuple[Any, Any]) -> None:
    loss_of = text_loss(logits_of(pair[1]))
    training = Training(pair[1], replace(RECIPE, num_steps=10))
    batches = windows(STREAM_S, RECIPE, torch.Generator())
    before = float(loss_of(next(batches)).detach())
    training.run(batches, loss_of, lambda: None)
    assert training.loss < before
