import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tools.distill import package
from tools.distill.evaluate import Evaluation
from tools.distill.model import Shape, TrainableLlama, save_model, write_json
from tools.distill.train import DISTIL_RECIPE, write_record
from tools.distill.vocabulary import save_tokenizer, train_tokenizer

from ssd.errors import SetupError

SHAPE = Shape(
    vocab_size=300, width=8, num_layers=1, num_heads=2, num_kv_heads=1, head_size=4, mlp_width=16
)
FOUND = Evaluation(
    target_loss=2.5,
    draft_loss=3.25,
    kl=0.125,
    agreement=0.75,
    tokens_per_round={"0.0": 4.125, "0.6": 4.0, "1.0": 3.5},
    bytes_per_token=3.5,
)


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    folder = tmp_path / "stages"
    save_tokenizer(train_tokenizer(["x = 1\n"], vocab_size=300), folder / "tokenizer")
    write_json(folder / "tokenizer" / "record.json", package.corpus_record(3, 1234))
    for stage in ("target", "draft", "distil", "agree/target", "distil-again"):
        model = TrainableLlama(SHAPE)
        model.initialise(torch.Generator().manual_seed(1))
        save_model(model, folder / stage)
    for stage in package.ROWS:
        write_record(folder / stage, DISTIL_RECIPE, 0, {"loss": 0.0625, "seconds": 60.0})
    write_json(folder / "evaluation-apart.json", asdict(replace(FOUND, target_loss=2.25)))
    write_json(folder / "evaluation.json", asdict(FOUND))
    return folder


def test_a_card_contains_the_figures_of_its_run(stages: Path) -> None:
    card = package.model_card("draft", stages)
    for figure in ("4.125", "3.25", "1,234 tokens", "KL 0.062", "PSF-2.0", "MIT"):
        assert figure in card
    assert "$" not in card


def test_the_card_of_a_pair_trained_together_shows_what_it_cost_the_target(stages: Path) -> None:
    card = package.model_card("target", stages, "agreed")
    assert "| 2.5 | 2.25 |" in card
    assert "was trained together" in card


def test_the_card_of_a_pair_trained_apart_lists_its_own_stages_only(stages: Path) -> None:
    card = package.model_card("target", stages, "apart")
    assert "| Loss of the target, nats a token | 2.25 |" in card
    assert "3. draft" in card
    assert "4. both" not in card
    assert "was trained together" not in card


def test_a_card_contains_the_number_of_parameters(stages: Path) -> None:
    config = json.loads((stages / "target" / "config.json").read_text(encoding="utf-8"))
    counted = sum(parameter.numel() for parameter in TrainableLlama(SHAPE).parameters())
    assert package.num_parameters(config) == counted


def test_assembling_replaces_both_folders_and_leaves_no_other_file(
    stages: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "demo" / "weights"
    package.assemble(stages, weights)
    (weights / "draft" / "stale").touch()
    package.assemble(stages, weights)
    assert [entry.name for entry in (tmp_path / "demo").iterdir()] == ["weights"]
    for name in ("target", "draft"):
        wanted = {*package.MODEL_FILES, *package.TOKENIZER_FILES, "README.md"}
        wanted |= {package.CHAT_TEMPLATE} if name == "target" else set()
        assert {file.name for file in (weights / name).iterdir()} == wanted


def test_a_pair_that_is_too_large_or_unfinished_is_refused(
    stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "MAX_PAIR_BYTES", 1000)
    with pytest.raises(SetupError, match="allowed are 1000"):
        package.assemble(stages, tmp_path / "weights")
    (stages / "distil-again" / "model.safetensors").unlink()
    with pytest.raises(SetupError, match="is missing"):
        package.assemble(stages, tmp_path / "weights")
    assert list((tmp_path / "weights").iterdir()) == []
