"""Penalties of present tokens have the values of penalties of all logits."""

import numpy as np
import pytest
import torch
from tests.sequences import make_sequence

from ssd.engine.sampling.logits import penalized
from ssd.types import SamplingParams
from ssd_target.decoding.device_steps import DeviceSteps, step_rows
from ssd_target.decoding.logits_steps import LogitsSteps, Penalties

V = 203
"""Not a multiple of any vector width."""
COLUMNS = 5


@pytest.mark.parametrize("seed", range(40))
def test_each_column_has_the_values_of_the_formula_for_all_logits(seed: int) -> None:
    random = np.random.default_rng(seed)
    scale = random.choice([0.1, 1.0, 30.0])
    sampling = SamplingParams(
        repetition_penalty=float(random.choice([1.0, random.uniform(0.5, 2.0)])),
        presence_penalty=float(random.choice([0.0, random.uniform(-2.0, 2.0)])),
        frequency_penalty=float(random.choice([0.0, random.uniform(-2.0, 2.0)])),
    )
    prompt = tuple(random.integers(0, V, random.integers(1, 2 * V)).tolist())
    sequence = make_sequence(prompt, sampling)
    on_host = Penalties(sequence, V)
    on_device = DeviceSteps(2, V, "cpu")
    on_device.admit(make_sequence((0, 1, 2), sampling))
    on_device.admit(sequence)
    steps = LogitsSteps(sequence, V)
    for _ in range(4):
        # Some tokens are also in the prompt, some are there several times.
        sequence.tokens += random.integers(0, V // 4, random.integers(0, 9)).tolist()
        proposed = tuple(random.integers(0, V // 4, COLUMNS - 1).tolist())
        logits_CV = torch.from_numpy(random.normal(0, scale, (COLUMNS, V)).astype(np.float32))
        logits_CV[0, ::7] = -torch.inf
        expected_CV = torch.cat(
            [
                every_logit(logits_CV[column, None], prompt, following, sampling)
                for column in range(COLUMNS)
                for following in [[*sequence.tokens[len(prompt) :], *proposed[:column]]]
            ]
        )
        rows = step_rows([steps], [proposed])
        assert torch.equal(on_device.scores(rows, logits_CV), expected_CV)
        for column in range(COLUMNS):
            on_host.apply(logits_CV[column], proposed[:column])
        assert torch.equal(logits_CV, expected_CV)


def every_logit(
    logits_1V: torch.Tensor, prompt: tuple[int, ...], new: list[int], sampling: SamplingParams
) -> torch.Tensor:
    """The formula for each token of the vocabulary, with counts from nothing."""
    new_ids = torch.tensor(new, dtype=torch.int64)
    return penalized(
        logits_1V,
        torch.bincount(new_ids, minlength=V).float()[None],
        torch.bincount(torch.tensor(prompt), minlength=V) > 0,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
    )
