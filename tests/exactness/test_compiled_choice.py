"""The choice of tokens on GPUs, compiled, has the words and the tokens of the CPU."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from tests.philox import philox4x32_10

from ssd.engine.sampling.choose import choose
from ssd.engine.sampling.keyed import NoiseKeys, choose_of_keys, packed, words_of_keys
from ssd.engine.sampling.soft_filters import lowered
from ssd.speculation.noise import gumbel_noise

NUM_IDS = 44
SEEDS = np.array([0, 2**64 - 5, 2**62 + 7], dtype=np.uint64)
CHOICES = np.array([0, 1, 3])
POSITIONS = np.array([0, 77, 2**32 - 1])


@pytest.mark.slow
def test_the_compiled_choice_is_the_same_with_any_number_of_rows() -> None:
    """Compiled as on CUDA, without the generation of kernels: one traced graph and its shapes."""

    def words_and_choice(logits_RV: torch.Tensor, keys: NoiseKeys) -> tuple[torch.Tensor, ...]:
        words_RV = words_of_keys(keys, 0, logits_RV.shape[1])
        return words_RV, choose_of_keys(logits_RV, keys, is_warm=True)

    compiled = torch.compile(words_and_choice, backend="aot_eager", dynamic=True, fullgraph=True)
    temperatures_R = np.array([1.0, 0.0, 0.5], dtype=np.float32)
    keys = NoiseKeys.unpacked(packed(SEEDS, CHOICES, POSITIONS, temperatures_R))
    counters_RQ4 = np.zeros((3, NUM_IDS // 4, 4), dtype=np.uint32)
    counters_RQ4[..., 0] = np.arange(NUM_IDS // 4)
    counters_RQ4[..., 1], counters_RQ4[..., 2] = POSITIONS[:, None], CHOICES[:, None]
    keys_R2 = SEEDS.view(np.uint32).reshape(3, 2)
    pairs = zip(counters_RQ4, keys_R2, strict=True)
    expected_RV = np.stack([philox4x32_10(*pair).ravel() for pair in pairs])
    addresses = zip(SEEDS.tolist(), POSITIONS.tolist(), CHOICES.tolist(), strict=True)
    noise = [
        gumbel_noise(seed, [position], NUM_IDS, choice) for seed, position, choice in addresses
    ]
    for repeats in (1, 2):
        rows_R = torch.arange(3).repeat(repeats)
        some = NoiseKeys(*(getattr(keys, each.name)[rows_R] for each in fields(keys)))
        logits_RV = torch.randn((len(rows_R), NUM_IDS), generator=torch.Generator().manual_seed(4))
        words_RV, chosen_R = compiled(logits_RV, some)
        assert np.array_equal(words_RV.numpy(), expected_RV[rows_R.numpy()])
        noise_RV = torch.from_numpy(np.concatenate(noise))[rows_R]
        assert torch.equal(chosen_R, choose(logits_RV, some.temperatures_R, noise_RV))
        assert torch.equal(chosen_R, choose_of_keys(logits_RV, some, is_warm=True))


@pytest.mark.slow
@pytest.mark.parametrize("num_ids", [NUM_IDS, 1003])
def test_the_compiled_filters_lower_the_same_logits(num_ids: int) -> None:
    compiled = torch.compile(lowered, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (1, 3, 6):
        logits_RV = torch.randn((rows, num_ids), generator=torch.Generator().manual_seed(4))
        ranks_R = torch.arange(rows) % 3 * 5
        min_logit_R = torch.linspace(-2.0, -0.5, rows)
        found_RV = compiled(logits_RV, ranks_R, min_logit_R)
        assert torch.equal(found_RV, lowered(logits_RV, ranks_R, min_logit_R))
