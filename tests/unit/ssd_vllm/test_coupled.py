"""The choices of a step of vLLM: equal to those of one row after the other, for any proposals."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.speculation.noise import gumbel_noise
from ssd.testing.fake_device import fake_device
from ssd_vllm import coupled
from ssd_vllm.coupled import CoupledNoise, StepAddresses, accept, noise_on_device

VOCAB = 8


def addresses(proposed: list[int], temperatures: list[float], seed: int = 5) -> StepAddresses:
    count = len(proposed)
    return StepAddresses(
        np.arange(seed, seed + count, dtype=np.uint64),
        np.array(temperatures, dtype=np.float32),
        np.arange(10, 10 + 3 * count, 3),
        np.array(proposed, dtype=np.int64),
    )


def choice(step: StepAddresses, request: int, column: int, logits_V: torch.Tensor) -> int:
    """The token of one row, by the definition."""
    noise = 0.0
    if step.temperatures_B[request] > 0:
        position = int(step.next_B[request]) + column
        noise = gumbel_noise(int(step.seeds_B[request]), [position], VOCAB)[0]
    return int(np.argmax(logits_V.numpy() + noise))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=5, max_size=5),
    st.integers(0, 2**32),
)
def test_a_step_accepts_what_one_row_after_the_other_would_choose(
    proposed: list[int], temperatures: list[float], seed: int
) -> None:
    step = addresses(proposed, temperatures[: len(proposed)])
    random = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn((sum(proposed), VOCAB), generator=random)
    last_BV = torch.randn((len(proposed), VOCAB), generator=random)
    noise = CoupledNoise()
    bonus_B = noise.choose(last_BV, step.keys_after_proposals())
    # Two tokens, so that some are accepted.
    proposed_R = torch.randint(0, 2, (sum(proposed),), generator=random, dtype=torch.int32)
    logits_RV[:, :2] += 2
    found = accept(noise, step, proposed_R, logits_RV, bonus_B, max(proposed))
    row = 0
    for request, count in enumerate(proposed):
        expected = []
        for column in range(count):
            expected.append(choice(step, request, column, logits_RV[row + column]))
            if expected[-1] != proposed_R[row + column]:
                break
        else:
            expected.append(choice(step, request, count, last_BV[request]))
        row += count
        padded = expected + [coupled.NOT_CHOSEN] * (max(proposed) + 1 - len(expected))
        assert found[request].tolist() == padded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_noise_on_a_device_is_that_of_the_host(temperature: float) -> None:
    step = addresses([2, 0, 3], [1.0, temperature, 1.0])
    keys = step.keys_of_rows(step.requests_of_rows(), step.columns_of_rows())
    on_host = CoupledNoise()._on_host(keys, VOCAB)
    on_device = noise_on_device(keys, VOCAB, "cpu")
    torch.testing.assert_close(on_device, on_host, rtol=0, atol=4e-6)


class Accelerator:
    """Looks like a device with kernels of its own; tensors are on the host."""

    type = "cuda"

    def __str__(self) -> str:
        return "cpu"


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_device_compiles_the_noise_once_and_never_for_a_single_row(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    compiled_for, sizes = [], []

    def compiled_on(device: str, function: Callable[..., torch.Tensor]) -> Any:
        compiled_for.append(device)

        def compiled(keys: Any, first_id: int, num_ids: int) -> torch.Tensor:
            sizes.append(len(keys.seeds_R))
            return function(keys, first_id, num_ids)

        return compiled

    monkeypatch.setattr(coupled, "compiled_on", compiled_on)
    monkeypatch.setattr(coupled, "BLOCK_VALUES", 4 * VOCAB)
    step = addresses([num_rows], [1.0])
    keys = step.keys_of_rows(step.requests_of_rows(), step.columns_of_rows())
    noise, device = CoupledNoise(), cast("torch.device", Accelerator())
    noise.reserve(VOCAB, device)
    found = noise._noise(keys, VOCAB, device)
    torch.testing.assert_close(found, CoupledNoise()._on_host(keys, VOCAB), rtol=0, atol=4e-6)
    assert compiled_for == ["cpu"]
    assert sizes == [4, max(2, num_rows)]


def test_nothing_is_reserved_on_the_host() -> None:
    noise = CoupledNoise()
    noise.reserve(VOCAB, torch.device("cpu"))
    assert noise._rows is None


def test_blocks_of_rows_choose_as_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    step = addresses([3, 2, 3], [1.0, 0.0, 1.0])
    keys = step.keys_of_rows(step.requests_of_rows(), step.columns_of_rows())
    logits_RV = torch.zeros((8, VOCAB))
    whole = CoupledNoise().choose(logits_RV, keys)
    monkeypatch.setattr(coupled, "BLOCK_VALUES", 3 * VOCAB)
    assert CoupledNoise().choose(logits_RV, keys).equal(whole)
    assert len(set(whole.tolist())) > 1


@pytest.mark.parametrize("temperatures", [[0.0, 0.0, 0.0], [1.0, 0.0, 0.7], [1.0, 1.0, 1.0]])
def test_a_step_on_a_device_mixes_no_devices_and_reads_nothing_back(
    temperatures: list[float],
) -> None:
    step, noise = addresses([3, 0, 1], temperatures), CoupledNoise()
    with fake_device() as device:
        last_BV = torch.empty((3, VOCAB), device=device.name)
        logits_RV = torch.empty((4, VOCAB), device=device.name)
        proposed_R = torch.empty(4, dtype=torch.int32, device=device.name)
        bonus_B = noise.choose(last_BV, step.keys_after_proposals())
        found = accept(noise, step, proposed_R, logits_RV, bonus_B, 3)
        assert (str(found.device), found.shape) == (device.name, (3, 4))
    assert device.num_reads == 0
