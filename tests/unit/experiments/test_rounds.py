"""Larger vocabularies, and the plot of the parts of a round."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.experiments.rounds import padded

from ssd.errors import ModelNotFoundError, SetupError
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_bench.plots import draw_rounds
from ssd_bench.round_parts import PARTS


def test_bars_of_two_runs_are_one_png(tmp_path: Path) -> None:
    parts = dict.fromkeys(PARTS, 0.5)
    records = [{"mode": "ssd", "batch": 1, "temperature": 0.0, "parts_ms": parts}]
    draw_rounds({"before": records, "after": records}, tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


def test_a_padded_vocabulary_keeps_the_weights_of_all_ids(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    padded_folder = padded(str(folder), 1000, tmp_path)
    before = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    after = load_file(padded_folder / "model.safetensors")["model.embed_tokens.weight"]
    assert after.shape == (1000, before.shape[1])
    assert torch.equal(after[: len(before)], before)
    assert not after[len(before) :].any()
    assert json.loads((padded_folder / "config.json").read_text())["vocab_size"] == 1000
    assert (padded_folder / "tokenizer.json").is_file()


def test_an_unreadable_config_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match=f"{folder}/config.json: not readable as JSON"):
        padded(str(folder), 1000, tmp_path)


def test_a_vocabulary_is_not_made_smaller(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="more than 100"):
        padded(str(write_tiny_folder(tmp_path / "tiny")), 100, tmp_path)
