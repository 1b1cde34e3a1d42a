"""Figures of a generation, from the measurements of the target."""

import json
from dataclasses import replace

import pytest

from ssd.testing.clock import FakeClock
from ssd.types import (
    FinishReason,
    GenerationChunk,
    Mode,
    PositionLogprobs,
    SpeculationStatistics,
    TokenLogprob,
)
from ssd_cli.demo import first_difference
from ssd_cli.figures import Collector, Figures, figures, why_not_speculative

STATISTICS = SpeculationStatistics(
    mode=Mode.SPECULATIVE,
    rounds=5,
    hits=3,
    misses=1,
    late=0,
    time_to_first_token_seconds=0.25,
    wall_seconds=3.0,
    decode_seconds=2.0,
    verify_seconds=0.009,
    round_seconds=0.01,
)


def test_figures_are_ratios_of_the_counters() -> None:
    found = figures(21, 7, STATISTICS)
    assert found.tokens_per_second == 10.0  # 20 tokens after the first in 2 s
    assert found.hit_rate == 0.75
    assert found.tokens_per_round == 4.2
    assert found.efficiency == pytest.approx(0.9)


def test_a_ratio_with_denominator_zero_is_none() -> None:
    found = figures(1, 7, SpeculationStatistics(mode=Mode.AUTOREGRESSIVE))
    assert found.tokens_per_second is None
    assert found.hit_rate is None
    assert found.tokens_per_round is None
    assert found.efficiency is None


def test_the_json_object_has_text_ids_reason_and_statistics() -> None:
    collector = Collector()
    collector.add(GenerationChunk(token_ids=(4, 5), text="de", seed=2**64 - 1))
    collector.add(
        GenerationChunk(
            token_ids=(6,), text="f", finish_reason=FinishReason.STOP, statistics=STATISTICS
        )
    )
    found = json.loads(json.dumps(collector.finish().as_json()))
    assert found["text"] == "def"
    assert found["token_ids"] == [4, 5, 6]
    assert found["finish_reason"] == "stop"
    assert found["statistics"]["seed"] == 2**64 - 1
    assert set(found["statistics"]) >= {
        *("tokens", "tokens_per_second", "time_to_first_token_seconds", "rounds", "hits"),
        *("misses", "late", "hit_rate", "tokens_per_round", "verify_seconds"),
        *("round_seconds", "efficiency", "mode", "seed"),
    }


def test_the_json_object_has_the_log_probabilities_of_openai() -> None:
    part_of_a_character = TokenLogprob(5, -0.5, "\N{REPLACEMENT CHARACTER}", b"\xc3")
    never = TokenLogprob(6, float("-inf"), "é")
    collector = Collector()
    collector.add(
        GenerationChunk(
            token_ids=(5,),
            text="",
            logprobs=(PositionLogprobs(part_of_a_character, (never,)),),
            finish_reason=FinishReason.LENGTH,
            statistics=STATISTICS,
        )
    )
    found = json.loads(json.dumps(collector.finish().as_json(), allow_nan=False))
    assert found["logprobs"] == [
        {
            "token_id": 5,
            "token": "\N{REPLACEMENT CHARACTER}",
            "logprob": -0.5,
            "bytes": [0xC3],
            "top_logprobs": [
                {"token_id": 6, "token": "é", "logprob": -9999.0, "bytes": [0xC3, 0xA9]}
            ],
        }
    ]


def test_a_partial_generation_has_the_figures_that_its_client_measured() -> None:
    clock = FakeClock()
    collector = Collector(clock)
    clock.advance(7.0)
    collector.start()
    for token_ids in ((1,), (2, 3, 4), (5, 6, 7)):
        clock.advance(0.5)
        collector.add(GenerationChunk(token_ids=token_ids, text="ab", seed=9))
    clock.advance(60.0)
    found = collector.partial()
    assert (found.text, found.finish_reason) == ("ababab", FinishReason.CANCELLED)
    assert found.figures == Figures(
        seed=9,
        tokens=7,
        tokens_per_second=6.0,  # 6 tokens after the first in 1 s
        time_to_first_token_seconds=0.5,
        wall_seconds=1.5,
    )
    assert json.loads(json.dumps(found.as_json()))["statistics"] == {
        "seed": 9,
        "tokens": 7,
        "tokens_per_second": 6.0,
        "time_to_first_token_seconds": 0.5,
        "wall_seconds": 1.5,
    }


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [((1, 2), (1, 2), None), ((), (), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1)],
)
def test_first_difference_returns_the_index(
    one: tuple[int, ...], other: tuple[int, ...], index: int | None
) -> None:
    assert first_difference(one, other) == index


def test_a_text_whose_speculation_was_off_says_so() -> None:
    paused = replace(STATISTICS, hits=0, misses=0, late=0, rounds=9, paused_rounds=6)
    assert why_not_speculative(figures(9, 0, paused), ()) == (
        "the target turned it off in 6 of 9 rounds, because plain decoding is faster; "
        "--mode speculative forces it"
    )
    missed = figures(9, 0, replace(paused, misses=3))
    assert why_not_speculative(missed, ()) == "none of 3 tables contained the outcome of its round"


def test_a_partial_generation_has_all_continuations() -> None:
    clock = FakeClock()
    clock.advance(7.0)
    collector = Collector(clock)
    collector.start()
    has_tokens = [collector.has_tokens]
    collector.add(GenerationChunk(token_ids=(4,), text="b", choice=1))
    end = GenerationChunk(
        token_ids=(5,),
        text="c",
        choice=2,
        finish_reason=FinishReason.STOP,
        statistics=STATISTICS,
    )
    collector.add(end)
    assert [*has_tokens, collector.has_tokens] == [False, True]
    found = collector.partial("lost")
    assert (found.text, found.error) == ("", "lost")
    assert (found.figures.time_to_first_token_seconds, found.figures.wall_seconds) == (0.0, 0.0)
    assert [(each.text, each.finish_reason, each.error) for each in found.others] == [
        ("b", FinishReason.FAILED, "lost"),
        ("c", FinishReason.STOP, ""),
    ]
