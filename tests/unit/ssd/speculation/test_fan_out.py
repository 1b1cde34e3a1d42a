"""Fan-out, compared with enumeration, direct optimisation and a synthetic pair."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from ssd.errors import SettingsError
from ssd.speculation.fan_out import (
    POLICIES,
    START_VALUES,
    Adaptive,
    Candidates,
    FanOutPolicy,
    Int64s,
    SelectedOutcomes,
    Split,
    geometric_share,
    make_policy,
    uniform_share,
)
from ssd.speculation.noise import gumbel_noise

NUM_TOKENS = 30
GAP_WEIGHT, CONFIDENCE_WEIGHT, BIAS, SCORE_WEIGHT, RANK_WEIGHT = START_VALUES
Batch = tuple[Candidates, Int64s, Int64s]
UNEQUAL = Split(lambda num_proposed, _: (0, 0, 9, 1, 0)[: num_proposed + 1])
ALL = [*map(make_policy, POLICIES), UNEQUAL]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Sessions with proposals of the draft's own or foreign tokens; candidates may lack."""
    num_sessions, lookahead = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_kept = draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (num_sessions, lookahead + 1)
    ids_BPV = generator.permuted(np.tile(np.arange(NUM_TOKENS), (*shape, 1)), axis=2)
    scores_BPM = -np.sort(generator.exponential(2.0, (*shape, num_kept)), axis=2)
    num_there_BP = generator.integers(1, num_kept + 1, shape)
    scores_BPM[np.arange(num_kept) >= num_there_BP[:, :, None]] = -np.inf
    candidates = Candidates(ids_BPV[:, :, :num_kept], scores_BPM.astype(np.float32))
    proposal_BK = np.where(
        generator.random((num_sessions, lookahead)) < 0.7,
        candidates.ids_BPM[:, :-1, 0],
        generator.integers(0, NUM_TOKENS, (num_sessions, lookahead)),
    )
    return candidates, proposal_BK, generator.integers(0, lookahead + 1, num_sessions)


def pairs(forks: SelectedOutcomes, session: int) -> list[tuple[int, int]]:
    """The outcomes of one session in order."""
    num = int(forks.num_branches_B[session])
    accepted, bonus = forks.accepted_BN[session, :num], forks.bonus_BN[session, :num]
    return list(zip(accepted.tolist(), bonus.tolist(), strict=True))


def possible(batch: Batch, session: int) -> list[tuple[int, int]]:
    """All outcomes of one session by (k, rank)."""
    candidates, proposal_BK, num_proposed_B = batch
    found = []
    for k in range(int(num_proposed_B[session]) + 1):
        for token, score in zip(
            candidates.ids_BPM[session, k], candidates.scores_BPM[session, k], strict=True
        ):
            is_proposed = k < num_proposed_B[session] and token == proposal_BK[session, k]
            if score > -math.inf and not is_proposed:
                found.append((k, int(token)))
    return found


def log_sum_exp(values: list[float]) -> float:
    """In plain arithmetic."""
    return math.log(sum(math.exp(value - max(values)) for value in values)) + max(values)


def acceptance(scores: list[float], ids: list[int], proposed: int, policy: Adaptive) -> float:
    """Alpha, one position."""
    if proposed == ids[0]:
        gap = min(scores[0] - scores[1], 30.0) if len(scores) > 1 else 30.0
        logit = GAP_WEIGHT * gap
        logit += CONFIDENCE_WEIGHT * (scores[0] - log_sum_exp(scores)) + BIAS
        return 1 / (1 + math.exp(-min(logit, 30.0)))
    score = scores[ids.index(proposed)] if proposed in ids else scores[-1]
    tempered = [value / policy.foreign_temperature for value in scores]
    return math.exp(score / policy.foreign_temperature - log_sum_exp(tempered))


def enumerate_law(batch: Batch, session: int, policy: Adaptive) -> dict[tuple[int, int], float]:
    """log P(k, v) of every outcome, one number at a time."""
    candidates, proposal_BK, num_proposed_B = batch
    law, log_reached = {}, 0.0
    num_proposed = int(num_proposed_B[session])
    for k in range(num_proposed + 1):
        scores = [float(u) for u in candidates.scores_BPM[session, k] if u > -math.inf]
        ids = candidates.ids_BPM[session, k, : len(scores)].tolist()
        outcomes = [each for each in possible(batch, session) if each[0] == k]
        logits = [
            SCORE_WEIGHT * scores[ids.index(token)] - RANK_WEIGHT * math.log(rank)
            for rank, (_, token) in enumerate(outcomes, start=1)
        ]
        log_rejected = 0.0
        log_accepted = 0.0
        if k < num_proposed:
            alpha = acceptance(scores, ids, int(proposal_BK[session, k]), policy)
            alpha = min(max(alpha, 1e-13), 1 - 1e-12)
            log_accepted, log_rejected = math.log(alpha), math.log1p(-alpha)
        for outcome, logit in zip(outcomes, logits, strict=True):
            law[outcome] = log_reached + log_rejected + logit - log_sum_exp(logits)
        log_reached += log_accepted
    return law


@given(batches(), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_adaptive_selects_the_most_likely_outcomes_of_an_enumeration(
    batch: Batch, num_branches: int
) -> None:
    candidates, _, num_proposed_B = batch
    policy = Adaptive()
    forks = policy.choose(*batch, num_branches)
    for session, num_proposed in enumerate(num_proposed_B.tolist()):
        law = enumerate_law(batch, session, policy)
        chosen = pairs(forks, session)
        always = (num_proposed, int(candidates.ids_BPM[session, num_proposed, 0]))
        assert chosen[0] == always
        assert len(chosen) == min(num_branches, len(law))
        best_others = sorted((law[each] for each in law if each != always), reverse=True)
        chosen_others = [law[each] for each in chosen[1:]]
        assert chosen_others == pytest.approx(best_others[: len(chosen) - 1], abs=1e-6)


@pytest.mark.parametrize("policy", ALL)
@given(batch=batches(), num_branches=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_every_policy_selects_possible_outcomes_once_and_fills_the_table(
    policy: FanOutPolicy, batch: Batch, num_branches: int
) -> None:
    candidates, _, num_proposed_B = batch
    forks = policy.choose(*batch, num_branches)
    assert forks.accepted_BN.shape == forks.bonus_BN.shape == (len(num_proposed_B), num_branches)
    for session, num_proposed in enumerate(num_proposed_B.tolist()):
        outcomes = possible(batch, session)
        chosen = pairs(forks, session)
        assert len(set(chosen)) == len(chosen) == min(num_branches, len(outcomes))
        assert set(chosen) <= set(outcomes)
        assert (num_proposed, int(candidates.ids_BPM[session, num_proposed, 0])) in chosen
        assert (forks.accepted_BN[session, len(chosen) :] == -1).all()
        assert (forks.bonus_BN[session, len(chosen) :] == -1).all()


@given(batches(), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_outcomes_do_not_depend_on_other_sessions(batch: Batch, num_branches: int) -> None:
    candidates, proposal_BK, num_proposed_B = batch
    for policy in ALL:
        forks = policy.choose(*batch, num_branches)
        for session in range(len(num_proposed_B)):
            one = slice(session, session + 1)
            alone = Candidates(candidates.ids_BPM[one], candidates.scores_BPM[one])
            forks_alone = policy.choose(alone, proposal_BK[one], num_proposed_B[one], num_branches)
            assert pairs(forks_alone, 0) == pairs(forks, session)


def full_batch(num_proposed: int, lookahead: int, num_kept: int) -> Batch:
    """One session whose draft takes its own best token everywhere."""
    ids_BPM = np.arange((lookahead + 1) * num_kept).reshape(1, lookahead + 1, num_kept)
    scores_BPM = -np.arange(num_kept, dtype=np.float32) * np.ones((1, lookahead + 1, 1), np.float32)
    return Candidates(ids_BPM, scores_BPM), ids_BPM[:, :-1, 0], np.array([num_proposed])


@pytest.mark.parametrize(
    ("policy", "num_proposed", "expected"),
    [
        (Split(uniform_share), 3, [3, 3, 2, 2]),
        (Split(uniform_share), 1, [5, 5, 0, 0]),
        (Split(uniform_share), 0, [10, 0, 0, 0]),
        (UNEQUAL, 3, [0, 0, 9, 1]),
    ],
)
def test_a_split_gives_each_position_its_share(
    policy: FanOutPolicy, num_proposed: int, expected: list[int]
) -> None:
    forks = policy.choose(*full_batch(num_proposed, 3, 16), 10)
    assert np.bincount(forks.accepted_BN[0], minlength=4).tolist() == expected


def test_a_share_without_candidates_is_given_to_other_positions() -> None:
    forks = Split(lambda *_: (10, 0, 0, 0)).choose(*full_batch(3, 3, 4), 10)
    assert forks.num_branches_B.tolist() == [10]
    assert np.bincount(forks.accepted_BN[0], minlength=4).tolist() == [3, 3, 2, 2]


def miss_chance(split: tuple[int, ...], acceptance_: float, exponent: float) -> float:
    """SSD Theorem 12's objective; no branch is a certain miss."""
    reached = [acceptance_**k for k in range(len(split))]
    here = [p * (1 - acceptance_) for p in reached[:-1]] + [reached[-1]]
    return sum(p * (f**-exponent if f else 2.0) for p, f in zip(here, split, strict=True))


@pytest.mark.parametrize(("acceptance_", "exponent"), [(0.5, 1.0), (0.7, 0.5), (0.8, 1.0)])
def test_geometric_is_near_the_best_whole_split_and_at_the_best_real_one(
    acceptance_: float, exponent: float
) -> None:
    num_branches, num_proposed = 12, 3
    split = geometric_share(acceptance_, exponent, num_proposed, num_branches)
    assert sum(split) == num_branches
    every = itertools.product(range(1, num_branches), repeat=num_proposed)
    whole = [(*each, num_branches - sum(each)) for each in every if sum(each) < num_branches]
    best = min(miss_chance(each, acceptance_, exponent) for each in whole)
    assert miss_chance(split, acceptance_, exponent) <= 1.03 * best

    def objective(free: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        shares = np.exp(np.append(free, 0.0))
        real = num_branches * shares / shares.sum()
        return miss_chance(tuple(real.tolist()), acceptance_, exponent)

    found = optimize.minimize(objective, np.zeros(num_proposed), tol=1e-12)
    shares = np.exp(np.append(found.x, 0.0))
    assert np.abs(num_branches * shares / shares.sum() - np.array(split)).max() < 1.0


def test_start_values_have_a_higher_hit_rate_than_uniform_on_a_synthetic_pair() -> None:
    """Draft logits of varying sharpness, a target that differs by noise, T = 1, coupled.

    With 1 500 rounds the difference of two paired hit rates has a standard deviation under .016.
    """
    num_rounds, num_positions, num_tokens, num_kept = 1500, 5, 64, 17
    generator = np.random.default_rng(0)
    shape = (num_rounds, num_positions, num_tokens)
    sharpness_BP1 = generator.uniform(0.5, 4.0, (num_rounds, num_positions, 1))
    draft_BPV = sharpness_BP1 * generator.normal(size=shape)
    target_BPV = draft_BPV + 0.8 * generator.normal(size=shape)
    noise_BPV = gumbel_noise(1, range(num_rounds * num_positions), num_tokens).reshape(shape)
    draft_BPV -= np.log(np.exp(draft_BPV).sum(axis=2, keepdims=True))
    scores_BPV = draft_BPV + noise_BPV
    ids_BPM = np.argsort(-scores_BPV, axis=2)[:, :, :num_kept]
    scores_BPM = np.take_along_axis(scores_BPV, ids_BPM, axis=2).astype(np.float32)
    chosen_BP = (target_BPV + noise_BPV).argmax(axis=2)
    agrees_BK = chosen_BP[:, :-1] == ids_BPM[:, :-1, 0]
    accepted_B = np.cumprod(agrees_BK, axis=1).sum(axis=1)
    bonus_B = chosen_BP[np.arange(num_rounds), accepted_B]

    def hit_rate(policy: FanOutPolicy) -> float:
        num_proposed_B = np.full(num_rounds, num_positions - 1)
        forks = policy.choose(
            Candidates(ids_BPM, scores_BPM), ids_BPM[:, :-1, 0], num_proposed_B, 10
        )
        is_it_BN = (forks.accepted_BN == accepted_B[:, None]) & (forks.bonus_BN == bonus_B[:, None])
        return float(is_it_BN.any(axis=1).mean())

    assert hit_rate(make_policy("adaptive")) > hit_rate(make_policy("uniform")) + 0.05


def test_an_unknown_policy_is_rejected() -> None:
    with pytest.raises(SettingsError, match="adaptive"):
        make_policy("best")
