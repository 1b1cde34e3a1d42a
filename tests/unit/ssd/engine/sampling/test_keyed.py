"""The choice with noise that is computed from keys, on the device of the logits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.engine.sampling.choose import choose
from ssd.engine.sampling.keyed import NoiseKeys, choose_of_keys, gumbel_of_keys, packed
from ssd.speculation.noise import gumbel_noise
from ssd.testing.fake_device import fake_device
from ssd.types import NO_TOKEN

NUM_IDS = 1003
SEEDS = np.array([0, 2**64 - 5, 2**62 + 7], dtype=np.uint64)
CHOICES = np.array([0, 1, 3])
POSITIONS = np.array([0, 77, 2**32 - 1])


def keys_of(*temperatures: float) -> NoiseKeys:
    temperature_R = np.array(temperatures, dtype=np.float32)
    return NoiseKeys.unpacked(packed(SEEDS, CHOICES, POSITIONS, temperature_R))


def noise_of_rows(num_ids: int) -> torch.Tensor:
    addresses = zip(SEEDS.tolist(), POSITIONS.tolist(), CHOICES.tolist(), strict=True)
    rows = [gumbel_noise(seed, [position], num_ids, choice) for seed, position, choice in addresses]
    return torch.from_numpy(np.concatenate(rows))


def test_the_noise_is_that_of_the_drafts() -> None:
    noise_RV = gumbel_of_keys(keys_of(1, 1, 1), 0, NUM_IDS)
    assert torch.allclose(noise_RV, noise_of_rows(NUM_IDS), rtol=0, atol=2e-6)


def test_a_part_of_the_vocabulary_has_the_noise_of_its_tokens() -> None:
    whole_RV = gumbel_of_keys(keys_of(1, 1, 1), 0, NUM_IDS)
    assert torch.equal(gumbel_of_keys(keys_of(1, 1, 1), 400, 500), whole_RV[:, 400:900])


def test_packed_keys_keep_every_bit() -> None:
    keys = keys_of(0.0, 0.7, 1e-8)
    assert keys.seeds_R.numpy().view(np.uint64).tolist() == SEEDS.tolist()
    assert keys.choices_R.tolist() == CHOICES.tolist()
    assert keys.positions_R.tolist() == POSITIONS.tolist()
    assert torch.equal(keys.temperatures_R, torch.tensor([0.0, 0.7, 1e-8]))


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    temperatures=st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=3, max_size=3),
)
def test_the_token_is_that_of_the_host(seed: int, temperatures: list[float]) -> None:
    logits_RV = torch.randn((3, 41), generator=torch.Generator().manual_seed(seed)) * 2
    keys = keys_of(*temperatures)
    expected_R = choose(logits_RV, keys.temperatures_R, noise_of_rows(41))
    assert torch.equal(choose_of_keys(logits_RV, keys, is_warm=True), expected_R)
    if not any(temperatures):
        assert torch.equal(choose_of_keys(logits_RV, keys, is_warm=False), expected_R)


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_token_and_affects_no_other(
    number: float, *, is_warm: bool
) -> None:
    logits_RV = torch.tensor([[0.0, 40.0, 1.0], [0.0, 2.0, number], [-torch.inf] * 3])
    temperature = 1.0 if is_warm else 0.0
    keys = keys_of(temperature, temperature, temperature)
    chosen_R = choose_of_keys(logits_RV, keys, is_warm=is_warm)
    assert chosen_R.tolist() == [1, NO_TOKEN, NO_TOKEN]


def test_ties_go_to_the_lowest_id() -> None:
    assert (
        choose_of_keys(torch.zeros((3, 5000)), keys_of(0, 0, 0), is_warm=False).tolist() == [0] * 3
    )


def test_a_choice_on_a_device_mixes_no_devices_and_reads_nothing_back() -> None:
    with fake_device() as device:
        keys = NoiseKeys.unpacked(torch.empty((4, 6), dtype=torch.int64, device=device.name))
        logits_RV = torch.empty((6, 128_256), device=device.name)
        for is_warm in (False, True):
            chosen_R = choose_of_keys(logits_RV, keys, is_warm=is_warm)
            assert str(chosen_R.device) == device.name
    assert device.num_reads == 0
