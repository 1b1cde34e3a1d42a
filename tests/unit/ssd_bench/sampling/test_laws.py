from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scipy.stats import chisquare

from ssd.types import Outcome
from ssd_bench.sampling.laws import Coupled, Float32s, Law, Saguaro, softmax

TARGET_PV = np.array([[1.2, 0.3, -0.5, 0.9, -1.0], [0.1, 1.4, 0.2, -0.7, 0.6]], dtype=np.float32)
DRAFT_PV = np.array([[0.2, 1.1, -0.9, 1.3, -0.2], [0.9, 0.3, -0.2, 0.1, 1.0]], dtype=np.float32)
NEAR_PV = TARGET_PV + np.array([0.2, -0.1, 0.1, 0.1, -0.2], dtype=np.float32)
"""Logits of a draft that is good."""
NUM_TEXTS = 4_000
MIN_P_VALUE = 1e-4


def saguaro(weight: float, seed: int) -> Law:
    return Saguaro(0.8, np.random.default_rng(seed), weight, cache_size=2)


LAWS: dict[str, Callable[[int], Law]] = {
    "coupled": partial(Coupled, 0.8),
    **{f"C = {weight:g}": partial(saguaro, weight) for weight in (1.0, 0.5, 0.0)},
}


def rounds(
    law_of: Callable[[int], Law], draft_PV: Float32s = DRAFT_PV
) -> list[tuple[list[int], Outcome]]:
    found = []
    for seed in range(NUM_TEXTS):
        law = law_of(seed)
        proposal = [law.propose(draft_PV[0], 7)]
        found.append((proposal, law.verify(TARGET_PV, draft_PV, proposal, 7)))
    return found


def p_value(tokens: list[int], row: int) -> float:
    expected = softmax(TARGET_PV[row], 0.8) * len(tokens)
    counts = np.bincount(tokens, minlength=expected.size)
    return float(chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("name", LAWS)
def test_tokens_have_the_distribution_of_the_target(name: str) -> None:
    found = rounds(LAWS[name])
    first = [proposal[0] if outcome.accepted else outcome.bonus for proposal, outcome in found]
    assert p_value(first, 0) > MIN_P_VALUE
    second = [outcome.bonus for _, outcome in found if outcome.accepted]
    assert p_value(second, 1) > MIN_P_VALUE


def test_a_smaller_weight_accepts_less_and_leaves_more_of_the_cache_to_the_bonus() -> None:
    cache = set(np.argsort(-NEAR_PV[0])[:2].tolist())
    accepted, in_cache = {}, {}
    for weight in (1.0, 0.5, 0.0):
        found = [outcome for _, outcome in rounds(LAWS[f"C = {weight:g}"], NEAR_PV)]
        rejected = [each.bonus for each in found if not each.accepted]
        accepted[weight] = 1 - len(rejected) / len(found)
        in_cache[weight] = np.mean([each in cache for each in rejected])
    assert accepted[1.0] > accepted[0.5] > accepted[0.0]
    assert in_cache[1.0] < in_cache[0.5] <= in_cache[0.0]


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_at_temperature_0_all_laws_are_greedy(weight: float) -> None:
    for law in (Coupled(0.0, 3), Saguaro(0.0, np.random.default_rng(3), weight, 2)):
        assert law.propose(DRAFT_PV[0], 7) == DRAFT_PV[0].argmax()
        best = int(TARGET_PV[0].argmax())
        assert law.verify(TARGET_PV, DRAFT_PV, [best], 7) == Outcome(1, int(TARGET_PV[1].argmax()))
        assert law.verify(TARGET_PV, DRAFT_PV, [2], 7) == Outcome(0, best)


def test_a_draft_that_is_certain_proposes_its_token_at_any_weight() -> None:
    law = Saguaro(0.0, np.random.default_rng(0), 0.0, 1)
    assert law.propose(DRAFT_PV[0], 0) == DRAFT_PV[0].argmax()
