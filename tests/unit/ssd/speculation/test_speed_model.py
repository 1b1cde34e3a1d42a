"""Predicted speeds against the formulas of the paper and against simulated rounds."""

from dataclasses import replace
from random import Random

import pytest

from ssd.speculation.speed_model import (
    PairTimes,
    Rates,
    plain_speed,
    speculative_speed,
    synchronous_speed,
    tokens_per_round,
)

TIMES = PairTimes(plain=1.0, verify=1.0, proposal=0.8, table=0.7, overhead=0.0)
RATES = Rates(tokens_after_draft=3.0, hit_rate=0.9, tokens_after_miss=2.0, waits_after_miss=True)


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_tokens_of_a_round_are_the_truncated_geometric_sum(acceptance: float) -> None:
    expected = (1 - acceptance**7) / (1 - acceptance)
    assert tokens_per_round(acceptance, 6) == pytest.approx(expected)
    assert tokens_per_round(1.0, 6) == 7
    assert tokens_per_round(0.0, 6) == 1


def test_the_speed_up_over_plain_decoding_is_that_of_theorem_7() -> None:
    speed_up = speculative_speed(TIMES, RATES, 1).tokens_per_second
    assert plain_speed(TIMES, 1).tokens_per_second == 1
    assert speed_up == pytest.approx((0.9 * 3 + 0.1 * 2) / (0.9 * max(1, 0.7) + 0.1 * (1 + 0.8)))


def test_with_hits_only_the_gain_over_synchronous_drafting_is_that_of_corollary_8() -> None:
    always = replace(RATES, hit_rate=1.0)
    ratio = (
        speculative_speed(TIMES, always, 1).tokens_per_second
        / synchronous_speed(TIMES, always, 1).tokens_per_second
    )
    assert ratio == pytest.approx(1 + 0.8)


def test_a_batch_waits_if_one_of_its_sequences_misses() -> None:
    random = Random(1)
    rounds = 200_000
    waiting = sum(any(random.random() > 0.9 for _ in range(4)) for _ in range(rounds))
    simulated = 1 + 0.8 * waiting / rounds
    assert speculative_speed(TIMES, RATES, 4).round_seconds == pytest.approx(simulated, rel=0.01)


def test_without_a_wait_a_miss_costs_tokens_but_no_time() -> None:
    no_wait = replace(RATES, waits_after_miss=False, tokens_after_miss=1.0)
    speed = speculative_speed(TIMES, no_wait, 16)
    assert speed.round_seconds == 1.0
    assert speed.tokens_per_round == pytest.approx(0.9 * 3 + 0.1)
    assert speed.tokens_per_second == pytest.approx(16 * speed.tokens_per_round)


def test_efficiency_falls_with_a_slow_table_and_with_overhead() -> None:
    no_wait = replace(RATES, waits_after_miss=False)
    assert speculative_speed(TIMES, no_wait, 1).efficiency == 1.0
    assert speculative_speed(replace(TIMES, table=2.0), no_wait, 1).efficiency == 0.5
    assert speculative_speed(replace(TIMES, overhead=1.0), no_wait, 1).efficiency == 0.5
