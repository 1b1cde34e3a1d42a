"""Coupled sampling keeps the target's distribution, and the tokens depend only on the seed.

The target is a table: the probability of each next token after each last token, with a vocabulary
of four. So the joint distribution of three tokens is known exactly: 4^3 = 64 cells. Thousands of
sequences, each with its own seed, are decoded with the target's own parts (``RingSampler``,
``verify_coupled``, ``Sequence.append``). The tests cover each kind of proposal of a round:

- hit: the draft's tokens, of which the target accepts a part;
- miss: no proposal in some rounds, selected by the outcome;
- late: no proposal in every other round;
- ngram: guesses from the text;
- wrong: random tokens;
- dead: never a proposal.

Statistic: Pearson's chi-square of the 64 cells, sum of (observed - expected)^2 / expected. If
sampling is exact, it has the chi-square distribution with 63 degrees of freedom. The expected count
of every cell is at least five. Threshold: p > 1e-3. An exact sampler fails with one set of seeds in
a thousand; the seeds here are fixed. Power: a sampler whose third token is the draft's has
p < 1e-12 (asserted at the end).
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import chdtrc
from tests.sequences import make_sequence

from ssd.engine.config import EngineConfig
from ssd.speculation.backup import propose_ngram
from ssd.speculation.noise import gumbel_noise
from ssd.speculation.verification import verify_coupled
from ssd.types import SamplingParams
from ssd_target.decoding.sampler import RingSampler
from ssd_target.decoding.sequence import Sequence

NUM_TOKENS = 4
NUM_SEQUENCES = 6000
PROMPT = (1, 3, 1)
NUM_NEW = 3
LOOKAHEAD = 3
LENGTH = len(PROMPT) + NUM_NEW + LOOKAHEAD + 1

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
Proposer = Callable[[Int64s, Int64s, Float64s], tuple[Int64s, Int64s]]
"""(texts_BS, lengths_B, noise_BSV) -> (proposal_BK, num_proposed_B)."""

_generator = np.random.default_rng(2)
LAW_VV = _generator.dirichlet(np.full(NUM_TOKENS, 1.5), NUM_TOKENS) * 0.9 + 0.1 / NUM_TOKENS
DRAFT_VV = LAW_VV * _generator.uniform(0.3, 3.0, LAW_VV.shape)
ROWS = np.arange(NUM_SEQUENCES)


@cache
def noise_of_all() -> Float64s:
    """Noise of every sequence and position after the prompt; sequence b has seed b."""
    noise_BSV = np.zeros((NUM_SEQUENCES, LENGTH, NUM_TOKENS))
    positions = range(len(PROMPT), LENGTH)
    for seed in range(NUM_SEQUENCES):
        noise_BSV[seed, len(PROMPT) :] = gumbel_noise(seed, positions, NUM_TOKENS)
    noise_BSV.setflags(write=False)
    return noise_BSV


def choose(law_VV: Float64s, last_B: Int64s, noise_BV: Float64s) -> Int64s:
    """Return the token after ``last_B`` by the definition of coupled sampling."""
    chosen_B: Int64s = (np.log(law_VV)[last_B] + noise_BV).argmax(axis=1)
    return chosen_B


def draft_tokens(texts_BS: Int64s, lengths_B: Int64s, noise_BSV: Float64s) -> Int64s:
    """Return K tokens of the draft, with the same noise as the target's."""
    last_B = texts_BS[ROWS, lengths_B - 1]
    proposal_BK = np.empty((NUM_SEQUENCES, LOOKAHEAD), dtype=np.int64)
    for column in range(LOOKAHEAD):
        position_B = np.minimum(lengths_B + column, LENGTH - 1)
        last_B = proposal_BK[:, column] = choose(DRAFT_VV, last_B, noise_BSV[ROWS, position_B])
    return proposal_BK


def hit(texts_BS: Int64s, lengths_B: Int64s, noise_BSV: Float64s) -> tuple[Int64s, Int64s]:
    """Propose the K tokens of the draft: the table always contains the outcome."""
    return draft_tokens(texts_BS, lengths_B, noise_BSV), np.full(NUM_SEQUENCES, LOOKAHEAD)


def miss(texts_BS: Int64s, lengths_B: Int64s, noise_BSV: Float64s) -> tuple[Int64s, Int64s]:
    """Propose only after even tokens: whether the table has the outcome depends on it."""
    is_hit_B = texts_BS[ROWS, lengths_B - 1] % 2 == 0
    return draft_tokens(texts_BS, lengths_B, noise_BSV), np.where(is_hit_B, LOOKAHEAD, 0)


def late(texts_BS: Int64s, lengths_B: Int64s, noise_BSV: Float64s) -> tuple[Int64s, Int64s]:
    """Propose two tokens at even lengths: other tables are late."""
    num_proposed_B = np.where(lengths_B % 2 == 0, 2, 0)
    return draft_tokens(texts_BS, lengths_B, noise_BSV), num_proposed_B


def ngram(texts_BS: Int64s, lengths_B: Int64s, noise_BSV: Float64s) -> tuple[Int64s, Int64s]:
    """Propose n-grams of the text."""
    proposal_BK = np.full((NUM_SEQUENCES, LOOKAHEAD), -1, dtype=np.int64)
    num_proposed_B = np.zeros(NUM_SEQUENCES, dtype=np.int64)
    for row, length in enumerate(lengths_B.tolist()):
        tokens = propose_ngram(texts_BS[row, :length].tolist(), LOOKAHEAD, min_suffix=1).tokens
        proposal_BK[row, : len(tokens)] = tokens
        num_proposed_B[row] = len(tokens)
    return proposal_BK, num_proposed_B


def wrong(texts_BS: Int64s, lengths_B: Int64s, noise_BSV: Float64s) -> tuple[Int64s, Int64s]:
    """Propose a random number of random tokens."""
    generator = np.random.default_rng(int(lengths_B.sum()))
    proposal_BK = generator.integers(0, NUM_TOKENS, (NUM_SEQUENCES, LOOKAHEAD))
    return proposal_BK, generator.integers(0, LOOKAHEAD + 1, NUM_SEQUENCES)


def dead(texts_BS: Int64s, lengths_B: Int64s, noise_BSV: Float64s) -> tuple[Int64s, Int64s]:
    """Propose nothing, with tokens in the padding: plain decoding must not use them."""
    return draft_tokens(texts_BS, lengths_B, noise_BSV), np.zeros(NUM_SEQUENCES, dtype=np.int64)


PATHS: dict[str, Proposer] = {
    "hit": hit,
    "miss": miss,
    "late": late,
    "ngram": ngram,
    "wrong": wrong,
    "dead": dead,
}


def decode(propose: Proposer) -> Int64s:
    """Run rounds as the target does until every sequence is complete; return the new tokens."""
    sampler = sampler_of_all()
    sequences = [sequence_of(seed) for seed in range(NUM_SEQUENCES)]
    texts_BS = np.zeros((NUM_SEQUENCES, LENGTH), dtype=np.int64)
    texts_BS[:, : len(PROMPT)] = PROMPT
    lengths_B = np.full(NUM_SEQUENCES, len(PROMPT))
    log_law_VV = torch.from_numpy(np.log(LAW_VV)).float()
    while len(running_X := np.flatnonzero(lengths_B < len(PROMPT) + NUM_NEW)):
        proposal_BK, num_proposed_B = propose(texts_BS, lengths_B, noise_of_all())
        rows = [sequences[row] for row in running_X]
        proposal_XK, num_proposed_X = proposal_BK[running_X], num_proposed_B[running_X]
        newest_X = texts_BS[running_X, lengths_B[running_X] - 1]
        columns_XP = np.concatenate((newest_X[:, None], proposal_XK.clip(min=0)), axis=1)
        pairs = zip(proposal_XK.tolist(), num_proposed_X.tolist(), strict=True)
        proposals = [tuple(row[:count]) for row, count in pairs]
        chosen = sampler.choose(rows, proposals, log_law_VV[columns_XP])
        for row, proposed, tokens in zip(running_X, proposals, chosen, strict=True):
            outcome = verify_coupled(proposed, tokens)
            sequences[row].append((*proposed[: outcome.accepted], outcome.bonus))
            text = sequences[row].tokens
            texts_BS[row, : len(text)] = text
            lengths_B[row] = len(text)
    return texts_BS[:, len(PROMPT) : len(PROMPT) + NUM_NEW]


@cache
def sampler_of_all() -> RingSampler:
    """Return a sampler with the noise of all sequences: a function of seeds and positions."""
    engine = EngineConfig(max_model_len=64, max_num_seqs=NUM_SEQUENCES, num_columns=LOOKAHEAD + 1)
    sampler = RingSampler(engine, NUM_TOKENS)
    for seed in range(NUM_SEQUENCES):
        sampler.admit(sequence_of(seed))
    return sampler


def sequence_of(seed: int) -> Sequence:
    """Return the sequence of a seed; its slot differs from its row."""
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_NEW, ignore_eos=True)
    return make_sequence(PROMPT, sampling, slot=(seed + 1) % NUM_SEQUENCES)


@cache
def decoded(path: str) -> Int64s:
    """Return the new tokens with this kind of proposal; computed once."""
    tokens_B3 = decode(PATHS[path])
    tokens_B3.setflags(write=False)
    return tokens_B3


def p_value(tokens_B3: Int64s) -> float:
    """Return the p-value of Pearson's chi-square against the exact joint distribution."""
    cells_B = tokens_B3 @ np.array([NUM_TOKENS**2, NUM_TOKENS, 1])
    observed = np.bincount(cells_B, minlength=NUM_TOKENS**3)
    expected = NUM_SEQUENCES * np.array(
        [
            LAW_VV[PROMPT[-1], a] * LAW_VV[a, b] * LAW_VV[b, c]
            for a, b, c in product(range(NUM_TOKENS), repeat=3)
        ]
    )
    assert expected.min() >= 5, "too few sequences for the chi-square test"
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chdtrc(NUM_TOKENS**3 - 1, statistic))


@pytest.mark.parametrize("path", PATHS)
def test_three_tokens_have_the_exact_joint_distribution(path: str) -> None:
    tokens_B3 = decoded(path)
    assert p_value(tokens_B3) > 1e-3


@pytest.mark.parametrize("path", PATHS)
def test_every_seed_has_the_tokens_of_plain_sampling(path: str) -> None:
    tokens_B3 = decoded(path)
    last_B = np.full(NUM_SEQUENCES, PROMPT[-1])
    for column in range(NUM_NEW):
        last_B = choose(LAW_VV, last_B, noise_of_all()[:, len(PROMPT) + column])
        np.testing.assert_array_equal(tokens_B3[:, column], last_B)


def test_the_statistic_catches_a_sampler_that_keeps_the_drafts_tokens() -> None:
    tokens_B3 = decoded("dead").copy()
    last_B = tokens_B3[:, 1]
    tokens_B3[:, 2] = choose(DRAFT_VV, last_B, noise_of_all()[:, len(PROMPT) + 2])
    assert p_value(tokens_B3) < 1e-12
