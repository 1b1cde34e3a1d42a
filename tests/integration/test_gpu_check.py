"""The checks of the GPU check that compare tokens of real processes, on a CPU."""

from pathlib import Path

import pytest

from ssd.errors import LinkError
from ssd.types import Mode, SpeculationStatistics
from ssd_bench.gpu_check.channel import exchange
from ssd_bench.gpu_check.child import run_check
from ssd_bench.gpu_check.outcome import Environment, WrongResultError
from ssd_bench.gpu_check.tokens import Text, compare_texts
from ssd_bench.metrics import Continuation


@pytest.mark.parametrize(
    "name",
    [
        "tokens of qwen3",
        pytest.param("tokens of llama", marks=pytest.mark.slow),
        pytest.param("tokens of two ranks", marks=pytest.mark.slow),
        pytest.param("tokens of the embedded pair", marks=pytest.mark.slow),
    ],
)
def test_all_modes_have_the_same_tokens(name: str, tmp_path: Path) -> None:
    outcome = run_check(name, Environment(device="cpu", scratch=tmp_path))
    assert outcome.status == "passed", outcome.reason
    compared = outcome.figures["tokens_compared"]
    assert isinstance(compared, int)
    assert compared >= 3 * 2 * 16


@pytest.mark.slow
def test_messages_and_tokens_travel_over_the_collective_channel(tmp_path: Path) -> None:
    outcome = run_check("channel collective", Environment(device="cpu", scratch=tmp_path))
    assert outcome.status == "passed", outcome.reason
    assert outcome.figures["backend"] == "gloo"
    assert outcome.figures["pair_channel"] == "collective"


def test_a_process_that_ends_early_is_reported_at_once() -> None:
    with pytest.raises(LinkError, match="no such backend: no result: a process ended with 1"):
        exchange("no such backend", ("cpu", "cpu"))


@pytest.mark.slow
def test_all_modes_are_measured_at_each_batch_size(tmp_path: Path) -> None:
    outcome = run_check("speed of llama", Environment(device="cpu", scratch=tmp_path))
    assert outcome.status == "passed", outcome.reason
    for batch in (1, 2):
        for mode in ("ar", "sd", "ssd"):
            speed = outcome.figures[f"{mode}_{batch}_tokens_per_second"]
            assert isinstance(speed, float)
            assert speed > 0
        assert f"ssd_{batch}_efficiency" in outcome.figures


def text(mode: str, *token_ids: int, hits: int) -> Text:
    statistics = SpeculationStatistics(
        mode=Mode.SPECULATIVE, rounds=2, hits=hits, misses=1, verify_seconds=1, round_seconds=1
    )
    return Text(mode, 0.0, 0, Continuation(token_ids, statistics))


def test_a_different_token_is_a_wrong_result() -> None:
    with pytest.raises(WrongResultError, match=r"ssd differs from ar .* from token 1 of 3 on"):
        compare_texts([text("ar", 1, 2, 3, hits=0), text("ssd", 1, 9, 3, hits=1)])


def test_a_run_without_a_hit_is_a_wrong_result() -> None:
    with pytest.raises(WrongResultError, match="no round of ssd was a hit"):
        compare_texts([text("ar", 1, 2, hits=0), text("ssd", 1, 2, hits=0)])
