import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from ssd.errors import WeightsError
from ssd.speculation.fan_out import make_policy
from ssd.testing.tiny_folder import write_byte_tokenizer, write_tiny_folder
from ssd_bench.__main__ import main
from ssd_bench.sampling.command import policies
from ssd_bench.sampling.model import load_model
from ssd_bench.sampling.rounds import Cell, candidates_of, foreseen


def test_a_table_has_the_best_token_after_full_acceptance_and_never_the_proposed_one() -> None:
    scores_PV = np.random.default_rng(5).normal(size=(4, 30)).astype(np.float32)
    proposal = scores_PV[:3].argmax(axis=1).tolist()
    found = foreseen(make_policy("uniform"), candidates_of(scores_PV, 8, 1.0), proposal, 8)
    assert len(found) == 8
    assert (3, int(scores_PV[3].argmax())) in found
    assert not found & {(k, token) for k, token in enumerate(proposal)}


@pytest.mark.parametrize(
    ("lookahead", "branches", "shares"),
    [(6, 24, [12, 6, 2, 1, 1, 1, 1]), (2, 8, [4, 2, 2]), (1, 8, [4, 4])],
)
def test_explicit_fan_out_is_half_a_quarter_and_equal_shares(
    lookahead: int, branches: int, shares: list[int]
) -> None:
    scores_PV = np.random.default_rng(5).normal(size=(lookahead + 1, 30)).astype(np.float32)
    proposal = scores_PV[:-1].argmax(axis=1).tolist()
    policy = policies(lookahead, branches)["explicit"]
    found = foreseen(policy, candidates_of(scores_PV, branches, 1.0), proposal, branches)
    accepted = [k for k, _ in found]
    assert [accepted.count(k) for k in range(lookahead + 1)] == shares


def test_the_speed_of_a_miss_is_that_of_plain_decoding_or_of_a_wait() -> None:
    cell = Cell(1.0, "coupled", rounds=10, tokens=30, hits={"adaptive": 8})
    assert cell.speed_up(0.5, waits_after_miss=False) == pytest.approx(2.6)
    assert cell.speed_up(0.5, waits_after_miss=True) == pytest.approx(3.0 / 1.1)


def test_speeds_of_saguaro_sampling_have_the_fan_out_of_its_paper() -> None:
    cell = Cell(1.0, "Saguaro", 0.5, rounds=10, tokens=30, hits={"adaptive": 0, "geometric": 8})
    assert cell.speed_up(0.5, waits_after_miss=False) == pytest.approx(2.6)


@pytest.mark.parametrize("hits", [0, 5, 87, 100])
def test_the_interval_of_a_hit_rate_is_that_of_a_binomial(hits: int) -> None:
    expected = binomtest(hits, 100).proportion_ci(method="wilson")
    cell = Cell(1.0, "coupled", rounds=100, hits={"adaptive": hits})
    assert cell.hit_interval("adaptive") == pytest.approx((expected.low, expected.high), abs=1e-4)


# It imports torch, transformers and matplotlib, which takes most of 10 s on a busy machine.
@pytest.mark.timeout(60)
def test_laws_are_compared_on_the_embedded_pair(tmp_path: Path) -> None:
    few = ("--rounds", "4", "--temperatures", "0,1", "--cache-weights", "1,0")
    assert main(["sampling", *few, "--output", str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "sampling.json").read_text())
    assert [(each["temperature"], each["law"]) for each in cells] == [
        (0.0, "coupled"),
        (1.0, "coupled"),
        (1.0, "rejection"),
        (1.0, "Saguaro"),
    ]
    names = {"adaptive", "fitted", "geometric", "uniform", "explicit"}
    assert all(each["hits"].keys() == names for each in cells)
    assert all(each["rounds"] == 4 and each["tokens"] >= 4 for each in cells)
    assert len((tmp_path / "sampling.md").read_text().splitlines()) == 2 + len(cells)
    assert (tmp_path / "sampling.png").stat().st_size > 1000


@pytest.mark.timeout(60)
def test_models_with_other_padding_are_compared(tmp_path: Path) -> None:
    target = write_tiny_folder(tmp_path / "target", vocab_size=320)
    draft = write_tiny_folder(tmp_path / "draft", seed=1)
    pair = ("--target", str(target), "--draft", str(draft), "--output", str(tmp_path / "out"))
    few = ("--rounds", "4", "--temperatures", "1", "--cache-weights", "0.5")
    assert main(["sampling", *pair, *few]) == 0


def test_a_draft_with_another_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_tiny_folder(tmp_path / "target"), write_tiny_folder(tmp_path / "draft")
    write_byte_tokenizer(draft, end="<|another|>")
    pair = ("--target", str(target), "--draft", str(draft), "--output", str(tmp_path / "out"))
    assert main(["sampling", *pair, "--rounds", "1"]) == 2
    assert f"{draft} has another tokenizer than --target {target}" in capsys.readouterr().err


def test_missing_weights_are_not_drawn_at_random(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight is missing"):
        load_model(folder)


@pytest.mark.parametrize("wrong", [("--cache-weights", "2"), ("--temperatures", "warm")])
def test_a_wrong_number_is_a_usage_error(wrong: tuple[str, str]) -> None:
    assert main(["sampling", *wrong]) == 2
