"""Served tokens have the target's distribution after its filters, renormalised.

The target is a table of random logits: the law of each next token after each last one. The joint
law of two tokens after the filters is computed here from their definition, in float64. 1000
sequences, each with its own seed, are decoded with the target's own sampler: plain, with proposals
of a draft whose logits are filtered, and with those of one whose logits are not.

Statistic: Pearson's chi-square over the pairs that the filters keep, each with an expected count of
at least five. Threshold: p > 1e-3, as in ``test_coupled_law``; the seeds are fixed. A pair that the
filters remove must not occur. Power: the law with one token more or less has p < 1e-9.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import chdtrc
from tests.sequences import make_sequence

from ssd.engine.config import EngineConfig
from ssd.engine.sampling.logits import Filters, filtered
from ssd.speculation.verification import verify_coupled
from ssd.types import SamplingParams
from ssd_draft.token_choice import RingChoice
from ssd_target.decoding.sampler import RingSampler
from ssd_target.decoding.sequence import Sequence

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
V = 10


@dataclass(frozen=True)
class TokenFilters:
    """The filters of a case; see ``SamplingParams``."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


NO_FILTERS = TokenFilters()
NUM_SEQUENCES = 1000
PROMPT = (1, 3)
TEMPERATURE = 0.8
_generator = np.random.default_rng(4)
LOGITS_VV = _generator.normal(0.0, 0.7, (V, V)).astype(np.float32)
DRAFT_VV = (LOGITS_VV + _generator.normal(0.0, 0.15, (V, V))).astype(np.float32)
CASES = {
    "top-k": TokenFilters(top_k=4),
    "top-p": TokenFilters(top_p=0.7),
    "min-p": TokenFilters(min_p=0.3),
    "all": TokenFilters(top_k=6, top_p=0.9, min_p=0.2),
}


def law_after(filters: TokenFilters) -> Float64s:
    """Return P(next | last) by the definition of the filters, [V, V]."""
    weights_VV = np.exp(LOGITS_VV.astype(np.float64) / TEMPERATURE)
    law_VV = np.zeros((V, V))
    for last, weights_V in enumerate(weights_VV):
        kept = (-weights_V).argsort()[: filters.top_k or V].tolist()
        mass = np.cumsum(weights_V[kept]) / weights_V[kept].sum()
        kept = kept[: int(np.searchsorted(mass, min(filters.top_p, mass[-1]))) + 1]
        kept = [each for each in kept if weights_V[each] >= filters.min_p * weights_V.max()]
        law_VV[last, kept] = weights_V[kept] / weights_V[kept].sum()
    return law_VV


def sequence_of(seed: int, filters: TokenFilters) -> Sequence:
    sampling = SamplingParams(
        temperature=TEMPERATURE,
        top_k=filters.top_k,
        top_p=filters.top_p,
        min_p=filters.min_p,
        seed=seed,
        max_tokens=2,
        ignore_eos=True,
    )
    return make_sequence(PROMPT, sampling, slot=seed)


@cache
def draft_tokens(filters: TokenFilters) -> Int64s:
    """Return the first token that the draft chooses for each sequence."""
    choice = RingChoice(NUM_SEQUENCES, 1, V)
    slots_B = np.arange(NUM_SEQUENCES)
    for seed in range(NUM_SEQUENCES):
        choice.assign(seed, seed, 0, TEMPERATURE)
    next_B = np.full(NUM_SEQUENCES, len(PROMPT))
    choice.fill(slots_B, next_B, 1)
    filters_1 = Filters.on(
        "cpu",
        np.array([TEMPERATURE], dtype=np.float32),
        np.array([filters.top_k]),
        np.array([filters.top_p]),
        np.array([filters.min_p], dtype=np.float32),
    )
    logits_1V = filtered(torch.from_numpy(DRAFT_VV[[PROMPT[-1]]]), filters_1)
    logits_BV = logits_1V.expand(NUM_SEQUENCES, V)
    tokens_B: Int64s = choice.choose(logits_BV, slots_B, next_B).numpy()
    return tokens_B


@cache
def decoded(case: str, path: str) -> tuple[Int64s, float]:
    """Return two tokens of each sequence, and the share of proposals that were accepted."""
    filters = CASES[case]
    engine = EngineConfig(max_model_len=64, max_num_seqs=NUM_SEQUENCES, num_columns=2)
    sampler = RingSampler(engine, V)
    sequences = [sequence_of(seed, filters) for seed in range(NUM_SEQUENCES)]
    for each in sequences:
        sampler.admit(each)
    logits_VV = torch.from_numpy(LOGITS_VV)
    num_accepted = 0
    while running := [each for each in sequences if each.num_emitted < 2]:
        proposal_B1 = np.full((len(running), 1), -1, dtype=np.int64)
        is_first = len(running) == NUM_SEQUENCES
        if is_first and path != "plain":
            known = filters if path == "draft with filters" else NO_FILTERS
            proposal_B1 = draft_tokens(known)[:, None]
        newest_B = np.array([each.tokens[-1] for each in running])
        columns_B2 = np.stack((newest_B, proposal_B1[:, 0].clip(min=0)), axis=1)
        proposals = [(token,) if token >= 0 else () for (token,) in proposal_B1.tolist()]
        chosen = sampler.choose(running, proposals, logits_VV[columns_B2])
        for each, proposal, tokens in zip(running, proposals, chosen, strict=True):
            outcome = verify_coupled(proposal, tokens)
            each.append((*proposal[: outcome.accepted], outcome.bonus))
            num_accepted += outcome.accepted
    tokens_B2 = np.array([each.tokens[len(PROMPT) :] for each in sequences])
    return tokens_B2, num_accepted / NUM_SEQUENCES


def p_value(tokens_B2: Int64s, law_VV: Float64s) -> float:
    """Return the p-value of the pairs of tokens; 0 if one occurs that has no probability."""
    expected_VV = NUM_SEQUENCES * law_VV[PROMPT[-1]][:, None] * law_VV
    observed = np.bincount(tokens_B2 @ np.array([V, 1]), minlength=V * V).reshape(V, V)
    is_kept_VV = expected_VV > 0
    if observed[~is_kept_VV].any():
        return 0.0
    expected, found = expected_VV[is_kept_VV], observed[is_kept_VV]
    assert expected.min() >= 5, "too few sequences for the chi-square test"
    return float(chdtrc(len(expected) - 1, ((found - expected) ** 2 / expected).sum()))


@pytest.mark.parametrize("case", CASES)
def test_two_tokens_have_the_distribution_after_the_filters(case: str) -> None:
    plain_B2, _ = decoded(case, "plain")
    assert p_value(plain_B2, law_after(CASES[case])) > 1e-3
    tokens_B2, acceptance = decoded(case, "draft with filters")
    np.testing.assert_array_equal(tokens_B2, plain_B2)
    assert acceptance > 0.5


def test_a_draft_without_the_filters_changes_no_token_and_is_accepted_less_often() -> None:
    tokens_B2, acceptance = decoded("top-k", "draft without filters")
    np.testing.assert_array_equal(tokens_B2, decoded("top-k", "plain")[0])
    assert acceptance < decoded("top-k", "draft with filters")[1] - 0.1


def test_the_statistic_catches_filters_that_are_not_applied() -> None:
    tokens_B2, _ = decoded("top-k", "plain")
    for top_k in (3, 5):
        assert p_value(tokens_B2, law_after(TokenFilters(top_k=top_k))) < 1e-9
