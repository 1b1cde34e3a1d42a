from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tools.distill import package
from tools.distill.model import DRAFT, prepare_folder, untrained
from tools.distill.train import DISTIL_RECIPE
from tools.distill.vocabulary import TOKENIZER_FILES, save_tokenizer, train_tokenizer

from ssd.errors import SetupError
from ssd_distill.evaluation import Evaluation
from ssd_distill.models import write_weights
from ssd_distill.run_folder import RECORD, write_json

CONFIG = DRAFT | {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "head_dim": 4}
FOUND = Evaluation(
    target_loss=2.5,
    draft_loss=3.25,
    kl=0.125,
    agreement=0.75,
    tokens_per_round={"0": 4.125, "1": 3.5},
    hit_rate={"0": 0.875, "1": 0.625},
)
RUN = {
    "plan": {"recipe": asdict(DISTIL_RECIPE), "rounds": 600, "loss": "text + KL"},
    "seed": 0,
    "threads": 2,
    "torch": "2.13",
    "loss": 0.0625,
    "seconds": 60.0,
}


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    folder = tmp_path / "stages"
    save_tokenizer(train_tokenizer(["x = 1\n"], vocab_size=300), folder / "tokenizer")
    write_json(folder / "tokenizer" / "record.json", package.corpus_record(3, 1234, 4000))
    for stage in {*package.ROWS, "agree/target"}:
        made = prepare_folder(folder / stage, CONFIG, folder / "tokenizer")
        write_weights(untrained(made, 1), made)
    for stage in package.ROWS:
        write_json(folder / stage / RECORD, RUN | {"after": asdict(FOUND)})
    apart = RUN | {"after": asdict(replace(FOUND, target_loss=2.25))}
    write_json(folder / "distil" / RECORD, apart)
    return folder


def test_a_card_contains_the_figures_of_its_run(stages: Path) -> None:
    card = package.model_card("draft", stages)
    for figure in (
        "4.125",
        "0.625",
        "3.25",
        "1,234 tokens",
        "text + KL | 0.062",
        "PSF-2.0",
        "MIT",
    ):
        assert figure in card
    assert "$" not in card


def test_the_card_of_a_pair_trained_together_shows_what_it_cost_the_target(stages: Path) -> None:
    card = package.model_card("target", stages)
    assert "| 2.5 | 2.25 |" in card
    assert "was trained together" in card


def test_a_card_contains_the_number_of_parameters(stages: Path) -> None:
    model = untrained(stages / "target", 0)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert f"A Llama of {counted:,} parameters" in package.model_card("target", stages)


def test_assembling_replaces_both_folders_and_leaves_no_other_file(
    stages: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "demo" / "weights"
    package.assemble(stages, weights)
    (weights / "draft" / "stale").touch()
    package.assemble(stages, weights)
    assert [entry.name for entry in (tmp_path / "demo").iterdir()] == ["weights"]
    for name in ("target", "draft"):
        wanted = {*package.MODEL_FILES, *TOKENIZER_FILES, "README.md"}
        wanted |= {package.CHAT_TEMPLATE} if name == "target" else set()
        assert {file.name for file in (weights / name).iterdir()} == wanted


def test_a_pair_that_is_too_large_or_unfinished_is_refused(
    stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "MAX_PAIR_BYTES", 1000)
    with pytest.raises(SetupError, match="allowed are 1000"):
        package.assemble(stages, tmp_path / "weights")
    (stages / "distil-longer" / "model.safetensors").unlink()
    with pytest.raises(SetupError, match="is missing"):
        package.assemble(stages, tmp_path / "weights")
    assert list((tmp_path / "weights").iterdir()) == []
