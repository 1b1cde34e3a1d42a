"""The online fit of the fan-out: what it reaches, and its bounds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ssd.speculation.fan_out import START_VALUES, Adaptive, Candidates, Float64s
from ssd.speculation.fan_out_fit import (
    BATCH_ROUNDS,
    HIGHEST,
    LOWEST,
    MOST_WAITING,
    FanOutFit,
    Rounds,
)

K, M, N = 4, 17, 8
TRUE_VALUES = np.array((0.3, 0.5, -0.8, 0.5, 0.1))
"""Of a pair whose acceptance is much lower than the draft's scores predict."""


def synthetic_rounds(num_rounds: int, temperature: float = 1.0, seed: int = 0) -> Rounds:
    """Rounds whose outcomes have the law of ``Adaptive`` with ``TRUE_VALUES``."""
    generator = np.random.default_rng(seed)
    shape = (num_rounds, K + 1, M)
    scores_BPM = -np.cumsum(generator.exponential(0.6, shape), axis=2).astype(np.float32)
    ids_BPM = np.tile(np.arange(M), (num_rounds, K + 1, 1))
    num_proposed_B = np.full(num_rounds, K)
    proposal_BK = ids_BPM[:, :-1, 0]
    policy = Adaptive(values_of=lambda _candidates: TRUE_VALUES[None])
    candidates = Candidates(ids_BPM, scores_BPM)
    all_pairs = policy.choose(candidates, proposal_BK, num_proposed_B, (K + 1) * M)
    assert all_pairs.probability_BN is not None
    cumulative_BN = all_pairs.probability_BN.cumsum(axis=1)
    drawn_B1 = generator.random((num_rounds, 1)) * cumulative_BN[:, -1:]
    where = (np.arange(num_rounds), (cumulative_BN > drawn_B1).argmax(axis=1))
    return Rounds(
        ids_BPM,
        scores_BPM,
        np.full(num_rounds, temperature, dtype=np.float32),
        proposal_BK,
        num_proposed_B,
        all_pairs.accepted_BN[where].astype(np.int64),
        all_pairs.bonus_BN[where].astype(np.int64),
    )


def hit_rate(rounds: Rounds, values_X: Float64s) -> float:
    selected = Adaptive(values_of=lambda _candidates: values_X[None]).choose(
        Candidates(rounds.ids_BPM, rounds.scores_BPM), rounds.proposal_BK, rounds.num_proposed_B, N
    )
    is_it_BN = selected.accepted_BN == rounds.accepted_B[:, None]
    is_it_BN &= selected.bonus_BN == rounds.bonus_B[:, None]
    return float(is_it_BN.any(axis=1).mean())


def parts_of(rounds: Rounds, size: int) -> list[Rounds]:
    starts = range(0, len(rounds), size)
    return [Rounds(*(each[first : first + size] for each in rounds.arrays)) for first in starts]


def fitted(rounds: Rounds) -> FanOutFit:
    fit = FanOutFit(N)
    for part in parts_of(rounds, BATCH_ROUNDS):
        fit.add(part)
        fit.learn()
    return fit


def test_the_fit_reaches_the_hit_rate_of_the_true_values_from_the_start_values() -> None:
    """With 2,000 rounds, a difference of paired hit rates has a standard deviation under .01."""
    fit = fitted(synthetic_rounds(2000))
    later = synthetic_rounds(2000, seed=1)
    best, start = hit_rate(later, TRUE_VALUES), hit_rate(later, np.array(START_VALUES))
    found = hit_rate(later, fit.used_values()[-1])
    assert best > start + 0.05
    assert found > best - 0.02


def test_a_band_of_temperatures_does_not_change_another_one() -> None:
    fit = fitted(synthetic_rounds(320, temperature=0.5))
    assert fit.num_rounds_Z.tolist() == [0, 0, 320, 0]
    changed = (fit.values_ZX != np.array(START_VALUES)).any(axis=1)
    assert changed.tolist() == [False, False, True, False]
    temperature_B = np.array((0.0, 0.3, 0.7, 2.0), dtype=np.float32)
    candidates = Candidates(
        np.zeros((4, 1, 1), int), np.zeros((4, 1, 1), np.float32), temperature_B
    )
    assert (fit.values_of(candidates) == fit.used_values()).all()


def test_values_that_have_fewer_hits_than_the_start_values_are_not_used() -> None:
    fit = FanOutFit(N)
    fit.values_ZX[:] = LOWEST
    rounds = synthetic_rounds(BATCH_ROUNDS)
    best_B = rounds.ids_BPM[np.arange(len(rounds)), 0, 1]
    fit.add(replace(rounds, accepted_B=np.zeros(len(rounds), int), bonus_B=best_B))
    assert fit.learn()
    fit.advantage_Z[:] = -1.0
    assert (fit.used_values() == START_VALUES).all()
    fit.advantage_Z[:] = 1.0
    assert (fit.used_values() == fit.values_ZX).all()


def test_few_rounds_wait_and_too_many_are_dropped() -> None:
    fit = FanOutFit(N)
    fit.add(synthetic_rounds(BATCH_ROUNDS - 1))
    assert not fit.learn()
    for seed in range(40):
        fit.add(synthetic_rounds(BATCH_ROUNDS, seed=seed))
    assert fit.num_waiting == MOST_WAITING
    assert fit.learn()
    assert fit.num_waiting == 0


@st.composite
def odd_rounds(draw: st.DrawFn) -> Rounds:
    """Any outcome, also of tokens that are no candidates, and any scores of a broken model."""
    count = draw(st.integers(1, BATCH_ROUNDS))
    shape = (count, K + 1, M)
    scores = draw(st.sampled_from((0.0, 1.0, 1e3, 1e30, np.inf, np.nan)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    with np.errstate(all="ignore"):
        scores_BPM = (-np.sort(generator.exponential(1.0, shape), axis=2) * scores).astype(
            np.float32
        )
    num_proposed_B = draw(arrays(np.int64, count, elements=st.integers(0, K)))
    accepted_B = np.minimum(
        draw(arrays(np.int64, count, elements=st.integers(0, K))), num_proposed_B
    )
    return Rounds(
        generator.integers(0, 2**31, shape),
        scores_BPM,
        draw(arrays(np.float32, count, elements=st.sampled_from((0.0, 0.25, 1.0, 2.0)))),
        draw(arrays(np.int64, (count, K), elements=st.integers(-1, 2**31 - 1))),
        num_proposed_B,
        accepted_B,
        draw(arrays(np.int64, count, elements=st.integers(0, 2**31 - 1))),
    )


@given(st.lists(odd_rounds(), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_odd_outcomes_leave_finite_values_between_their_bounds(odd: list[Rounds]) -> None:
    fit = FanOutFit(N)
    with np.errstate(all="ignore"):
        for rounds in odd:
            fit.add(rounds)
            fit.learn()
    assert np.isfinite(fit.values_ZX).all()
    assert np.isfinite(fit.curvature_ZXX).all()
    assert (fit.values_ZX >= LOWEST).all()
    assert (fit.values_ZX <= HIGHEST).all()
    FanOutFit.from_text(fit.to_text(), N)


def test_a_target_that_repeats_one_outcome_reaches_a_bound_and_no_further() -> None:
    rounds = synthetic_rounds(4096)
    fit = fitted(replace(rounds, accepted_B=np.zeros(4096, int), bonus_B=np.full(4096, M - 1)))
    assert (fit.values_ZX >= LOWEST).all()
    assert (fit.values_ZX <= HIGHEST).all()


def test_a_fit_goes_on_as_before_from_its_text() -> None:
    first, second = parts_of(synthetic_rounds(640), 320)
    fit = fitted(first)
    read = FanOutFit.from_text(fit.to_text(), N)
    for each in (fit, read):
        each.add(Rounds(*(field[:64] for field in second.arrays)))
        each.learn()
    assert read.to_text() == fit.to_text()


@pytest.mark.parametrize(
    "change",
    [
        {"values_ZX": [[1.0]]},
        {"values_ZX": None},
        {"num_rounds_Z": ["a", "b", "c", "d"]},
        {"num_rounds_Z": [0, 0, -1, 0]},
        {"num_rounds_Z": [1.7e308, 0, 0, 0]},
        {"advantage_Z": [0.0, 0.0, 0.0, float("nan")]},
        {"curvature_ZXX": (-np.ones((4, 5, 5))).tolist()},
        {"curvature_ZXX": np.triu(np.full((4, 5, 5), 1e6), 1).tolist()},
        {"curvature_ZXX": np.full((4, 5, 5), 1e20).tolist()},
        {"curvature_ZXX": np.full((4, 5, 5), 1.7e308).tolist()},
    ],
)
def test_a_text_that_is_no_state_is_refused(change: dict[str, object]) -> None:
    state = json.loads(FanOutFit(N).to_text()) | change
    with pytest.raises(ValueError, match=next(iter(change))):
        FanOutFit.from_text(json.dumps(state), N)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}"])
def test_a_text_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        FanOutFit.from_text(text, N)
