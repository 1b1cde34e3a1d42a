"""Penalties and filters are those of transformers, and do not depend on the rows beside a row."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ssd.engine.sampling.logits import (
    Filters,
    best_logprobs,
    filtered,
    log_sums_by_row,
    log_sums_of_integers,
    penalized,
)

V = 203
"""Not a multiple of any vector width."""
TEMPERATURE = 0.7


def logits(count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, V), generator=torch.Generator().manual_seed(seed)) * 3


def filters(
    count: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0
) -> Filters:
    return Filters.on(
        "cpu",
        np.full(count, temperature, np.float32),
        np.full(count, top_k),
        np.full(count, top_p),
        np.full(count, min_p, np.float32),
    )


def run(processors: list[LogitsProcessor], logits_RV: Tensor) -> Tensor:
    ids = torch.zeros((len(logits_RV), 1), dtype=torch.int64)
    for each in processors:
        logits_RV = each(ids, logits_RV)
    return logits_RV


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (20, 1.0, 0.0),
        (V, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 1e-6, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.1),
        (0, 1.0, 1.0),
        (20, 0.8, 0.0),
        (5, 0.99, 0.05),
        (0, 0.5, 0.2),
        (V - 1, 1.0, 0.0),
        (V - 1, 0.9999, 0.0),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(
    top_k: int, top_p: float, min_p: float
) -> None:
    logits_RV = logits(400)
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(TEMPERATURE)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected_RV = run(warpers, logits_RV).isfinite()
    found_RV = filtered(logits_RV, filters(400, top_k, top_p, min_p, TEMPERATURE))
    kept_RV = found_RV.isfinite()
    assert torch.equal(kept_RV, expected_RV)
    assert torch.equal(found_RV[kept_RV], logits_RV[kept_RV]), "logits that remain are unchanged"


def test_tokens_as_likely_as_the_last_one_are_kept() -> None:
    logits_1V = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for each in (filters(1, top_k=2), filters(1, top_p=0.75)):
        assert filtered(logits_1V, each).isfinite().tolist() == [[True] * 4 + [False]]


def test_a_filter_never_keeps_a_token_that_is_not_allowed_and_never_removes_all() -> None:
    logits_RV = logits(50)
    logits_RV[:, 3:] = -torch.inf
    for each in (filters(50, top_k=10), filters(50, top_p=0.999), filters(50, min_p=0.5)):
        kept_RV = filtered(logits_RV, each).isfinite()
        assert not kept_RV[:, 3:].any()
        assert kept_RV.any(dim=1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_stays_so(value: float) -> None:
    logits_RV = logits(3)
    logits_RV[:, 7] = value
    found_RV = filtered(logits_RV, filters(3, top_k=5, top_p=0.9, min_p=0.1))
    assert not bool((found_RV == -torch.inf)[:, 7].any())
    all_masked_1V = torch.full((1, V), -torch.inf)
    assert torch.equal(filtered(all_masked_1V, filters(1, top_p=0.5)), all_masked_1V)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows_RV: filtered(rows_RV, filters(len(rows_RV), 60, 0.93, 0.001, 0.8)),
        lambda rows_RV: best_logprobs(rows_RV, torch.zeros(len(rows_RV), dtype=torch.int64), 5)[1],
        log_sums_of_integers,
    ],
)
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(
    function: Callable[[Tensor], Tensor],
) -> None:
    logits_RV = logits(64)
    together_RV = function(logits_RV)
    for count in (1, 3, 8):
        apart = [function(part_RV) for part_RV in logits_RV.split(count)]
        assert torch.equal(torch.cat(apart), together_RV)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits_1V = logits(1)
    prompt, new = [5, 9, 9], [9, 11, 30]
    counts_1V, is_prompt_V = torch.zeros(1, V), torch.zeros(V, dtype=torch.bool)
    counts_1V[0, new] = 1.0
    is_prompt_V[prompt] = True
    for penalty in (1.3, 0.8):
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected_1V = processor(torch.tensor([prompt + new]), logits_1V)
        found_1V = penalized(
            logits_1V, counts_1V, is_prompt_V, repetition=penalty, presence=0.0, frequency=0.0
        )
        assert torch.equal(found_1V, expected_1V)


def test_presence_counts_once_and_frequency_each_time_and_neither_counts_the_prompt() -> None:
    counts_2V = torch.tensor([[0.0, 0.0, 1.0, 3.0], [0.0, 2.0, 0.0, 0.0]])
    is_prompt_V = torch.tensor([True, False, False, True])
    found_2V = penalized(
        torch.ones(2, 4), counts_2V, is_prompt_V, repetition=1.0, presence=0.5, frequency=0.25
    )
    assert found_2V.tolist() == [[1.0, 1.0, 0.25, -0.25], [1.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize("log_sums", [log_sums_by_row, log_sums_of_integers])
@pytest.mark.parametrize("scale", [0.0, 1.0, 50.0])
def test_log_sums_are_those_of_exact_numbers(
    log_sums: Callable[[Tensor], Tensor], scale: float
) -> None:
    logits_RV = torch.cat((logits(3), torch.full((3, 100_000), -20.0)), dim=1) * scale
    expected_R1 = logits_RV.double().logsumexp(dim=1, keepdim=True)
    assert torch.allclose(log_sums(logits_RV).double(), expected_R1, atol=1e-6, rtol=1e-6)


def test_log_probabilities_are_those_of_the_model() -> None:
    logits_RV = logits(4)
    chosen_R = torch.tensor([3, 50, 0, 202])
    ids_RN, logprobs_RN = best_logprobs(logits_RV, chosen_R, 3)
    expected_RV = logits_RV.double().log_softmax(dim=1)
    assert torch.equal(ids_RN[:, 0], chosen_R)
    assert torch.equal(ids_RN[:, 1:], expected_RV.topk(3).indices)
    assert torch.allclose(logprobs_RN.double(), expected_RV.gather(1, ids_RN), atol=1e-5)
