"""The command, on random models of a few thousand weights."""

import json
import re
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.engine.config import ModelConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.runner import load_runner
from ssd.errors import SettingsError
from ssd.testing.tiny_folder import write_byte_tokenizer, write_tiny_folder, write_tiny_qwen3
from ssd_distill import distillation, run_folder
from ssd_distill.__main__ import main
from ssd_distill.losses import teacher_loss
from ssd_distill.models import Logits
from ssd_distill.training import LossFunction
from ssd_target.models import find_models
from ssd_target.settings import TargetSettings

STEPS = 5


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def serve(target: Path, draft: Path) -> None:
    """Load a draft as a target process does."""
    settings = TargetSettings(model=str(target), draft_model=str(draft), engine="torch")
    found = find_models(settings).draft
    assert found is not None
    load_runner(DraftRunner, found.folder, found.engine, lambda _stage, _fraction: None)


def interrupt_at(step: int) -> Callable[[Logits, Logits], LossFunction]:
    """Return ``teacher_loss`` with a Ctrl-C during one of its calls."""
    calls = count(1)

    def loss_with_interrupt(student: Logits, teacher: Logits) -> LossFunction:
        loss_of = teacher_loss(student, teacher)

        def loss(tokens_BS: Tensor) -> Tensor:
            if next(calls) == step:
                # The handler, not the signal: where no handler waits, it would end the tests.
                handler = signal.getsignal(signal.SIGINT)
                assert callable(handler)
                handler(signal.SIGINT, None)
            return loss_of(tokens_BS)

        return loss

    return loss_with_interrupt


def test_an_interrupted_run_goes_on_and_its_draft_is_served(
    flags: list[str],
    target: Path,
    draft: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags += ["--draft", str(draft), "--rate", "0.01"]
    output, whole = tmp_path / "output", tmp_path / "whole"
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "teacher_loss", interrupt_at(2))
        assert main([*flags, "--output", str(output)]) == 130
    assert f"stopped: {output} has step 2 of 5\n" in capsys.readouterr().err
    assert len(load_file(output / distillation.STATE)["losses"]) == 2
    serve(target, output)

    for folder in (output, whole):
        assert main([*flags, "--output", str(folder), "--json"]) == 0
    found, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (found["before"], found["after"]) == (other["before"], other["after"])
    assert found["after"]["kl"] < found["before"]["kl"]
    assert found["after"]["tokens_per_round"].keys() == {"0", "1"}
    trained, untrained = weights(output), weights(draft)
    assert trained.keys() == untrained.keys()
    for name, values in weights(whole).items():
        assert torch.equal(trained[name], values)
        assert not torch.equal(values, untrained[name])
    serve(target, output)
    modes = {path.stat().st_mode for path in output.iterdir()}
    assert modes == {(output / "config.json").stat().st_mode}
    names = {path.name for path in draft.iterdir()} | {run_folder.RECORD}
    assert {path.name for path in output.iterdir()} == names

    assert main([*flags, "--output", str(output)]) == 0
    table = capsys.readouterr()
    assert "tokens per round, T = 0" in table.out
    assert "hit rate, T = 1" in table.out
    assert f"{output} was already complete; try:" in table.err
    assert "written to" not in table.err


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_new_draft_has_the_family_and_the_head_size_of_its_target(
    family: str, flags: list[str], target: Path, tmp_path: Path
) -> None:
    if family == "qwen3":
        write_tiny_qwen3(target)
    output = tmp_path / "output"
    shape = ("--layers", "1", "--hidden", "16", "--output", str(output))
    assert main([*flags, *shape]) == 0
    found = ModelConfig.from_folder(output)
    assert (found.family, found.num_layers, found.hidden_size) == (family, 1, 16)
    assert (found.num_heads, found.num_kv_heads, found.head_size) == (2, 2, 8)
    assert (found.intermediate_size, found.tie_word_embeddings) == (32, True)
    serve(target, output)


def test_a_new_draft_can_have_more_layers_than_its_target(
    flags: list[str], target: Path, tmp_path: Path
) -> None:
    write_tiny_qwen3(target)
    # As transformers saves it.
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps(config | {"layer_types": ["full_attention"] * 2})
    )
    output = tmp_path / "output"
    assert main([*flags, "--layers", "3", "--hidden", "16", "--output", str(output)]) == 0
    serve(target, output)


@pytest.mark.parametrize(
    ("stored", "named", "written"),
    [
        (torch.float32, {}, torch.float32),
        (torch.float16, {"dtype": None}, torch.float16),
        (torch.float32, {"torch_dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_a_trained_draft_has_the_data_type_of_the_draft(
    stored: torch.dtype,
    named: dict[str, str | None],
    written: torch.dtype,
    flags: list[str],
    draft: Path,
    tmp_path: Path,
) -> None:
    values = {name: value.to(stored) for name, value in weights(draft).items()}
    save_file(values, draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | named))
    output = tmp_path / "output"
    assert main([*flags, "--draft", str(draft), "--output", str(output)]) == 0
    assert {value.dtype for value in weights(output).values()} == {written}
    found = json.loads((output / "config.json").read_text())
    assert f"torch.{found.get('dtype') or found['torch_dtype']}" == str(written)


def test_a_new_draft_that_cannot_be_made_leaves_no_folder(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def new_model(*_arguments: object) -> None:
        raise SettingsError("no such model")

    monkeypatch.setattr(distillation, "new_model", new_model)
    output = tmp_path / "output"
    assert main([*flags, "--layers", "1", "--hidden", "16", "--output", str(output)]) == 2
    assert not output.exists()


def test_a_draft_with_more_padding_than_its_target_is_trained(
    flags: list[str], tmp_path: Path
) -> None:
    wide = write_tiny_folder(tmp_path / "wide", seed=1, vocab_size=320)
    output = tmp_path / "output"
    assert main([*flags, "--draft", str(wide), "--output", str(output)]) == 0
    assert len(weights(output)["model.embed_tokens.weight"]) == 320


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ([], "give either --draft, or --layers and --hidden of a new one"),
        (["--layers", "1"], "give either --draft, or"),
        (["--draft", "DRAFT", "--hidden", "8"], "give either --draft, or"),
        (["--layers", "1", "--hidden", "20"], "must be a multiple of the target's head size 8"),
        (["--draft", "STRANGE"], "has another tokenizer than"),
        (["--draft", "nowhere"], "nowhere: there is no such folder"),
        (["--draft", "DRAFT", "--length", "512"], "has 256 positions, and --length 512"),
        (["--draft", "DRAFT", "--data", "nowhere"], "--data nowhere: there is no such file"),
        (["--draft", "DRAFT", "--output", "FILE/new"], "cannot be written (Not a directory)"),
        (["--draft", "DRAFT", "--output", "LINK"], "cannot be written (File exists): choose"),
        (["--draft", "DRAFT", "--output", "DRAFT"], "contains something else: use another folder"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_exit_code_2(
    changed: list[str],
    problem: str,
    flags: list[str],
    draft: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_byte_tokenizer(write_tiny_folder(tmp_path / "strange"), end="<|another|>")
    places = {"FILE/new": str(draft / "config.json" / "new"), "DRAFT": str(draft)}
    places |= {"STRANGE": str(tmp_path / "strange")}
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    places["LINK"] = str(tmp_path / "link")
    words = [places.get(word, word) for word in changed]
    assert main([*flags, "--output", str(tmp_path / "output"), *words], "ssd distill") == 2
    output = capsys.readouterr()
    assert output.out == ""
    *stages, error = output.err.splitlines()
    assert error.startswith("error: ")
    assert problem in error
    assert set(stages) <= {"loading", "reading text"}


NORM = "model.norm.weight"


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
        ({NORM: torch.full((32,), torch.nan)}, f"tensor {NORM} contains NaN or infinity"),
    ],
)
def test_weights_that_a_process_refuses_are_refused_before_the_training(
    role: str,
    changed: dict[str, Tensor | int],
    problem: str,
    flags_of_pair: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / role
    tensors = {name: value for name, value in changed.items() if isinstance(value, Tensor)}
    save_file(weights(folder) | tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {name: value for name, value in changed.items() if name not in tensors}
    (folder / "config.json").write_text(json.dumps(config))
    output = tmp_path / "output"
    assert main([*flags_of_pair, "--output", str(output)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {folder}")
    assert problem in error
    assert not output.exists()


def test_a_draft_with_a_row_that_is_not_finite_is_not_trained(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = write_tiny_folder(tmp_path / "draft", nan_token=3)
    assert main([*flags, "--draft", str(draft), "--output", str(tmp_path / "output")]) == 2
    assert f"error: {draft} has weights that are not finite" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_no_checkpoint(
    flags: list[str], draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    wrong = ("--draft", str(draft), "--rate", "1e30", "--checkpoint-minutes", "0")
    assert main([*flags, *wrong, "--output", str(output)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match("error: the weights are not finite after step [2-5]: lower --rate", error)
    assert all(value.isfinite().all() for value in weights(output).values())


def test_a_folder_of_another_run_is_refused_with_what_differs(
    flags: list[str], draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags += ["--draft", str(draft), "--steps", "1", "--output", str(tmp_path / "output")]
    assert main(flags) == 0
    assert main([*flags, "--seed", "3"]) == 2
    assert "is of a run with another seed (0, not 3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "is_complete"),
    [("data", True), ("data", False), ("target", False), ("draft", False)],
)
def test_a_run_is_refused_if_its_text_or_a_model_has_changed(
    changed: str,
    is_complete: bool,  # noqa: FBT001
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, draft = tmp_path / "output", write_tiny_folder(tmp_path / "draft", seed=1)
    flags += ["--draft", str(draft), "--steps", "2", "--output", str(output)]
    with monkeypatch.context() as patch:
        if not is_complete:
            patch.setattr(distillation, "teacher_loss", interrupt_at(1))
        assert main(flags) == (0 if is_complete else 130)
    before = weights(output)
    if changed == "data":
        text = tmp_path / "text.txt"
        text.write_text(text.read_text().replace("number", "letter"))
    else:
        write_tiny_folder(tmp_path / changed, seed=9, attention_gain=8)
    capsys.readouterr()
    assert main(flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"is of a run with other contents of --{changed}: use another folder" in error
    assert all(torch.equal(weights(output)[name], value) for name, value in before.items())


def test_a_run_goes_on_only_with_the_same_number_of_threads(
    flags: list[str],
    draft: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags += ["--draft", str(draft), "--output", str(tmp_path / "output")]
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "teacher_loss", interrupt_at(1))
        assert main(flags) == 130
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert main(flags) == 2
        assert ", not 99: use the same (--device, OMP_NUM_THREADS)" in capsys.readouterr().err
    assert main(flags) == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert main(flags) == 0, "a complete run has nothing left to train"


@pytest.mark.parametrize(
    ("name", "num_bytes"), [(distillation.STATE, 4), (distillation.WRITTEN, -1)]
)
def test_a_damaged_checkpoint_is_one_line_and_can_be_removed(
    name: str,
    num_bytes: int,
    flags_of_pair: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "output"
    flags = [*flags_of_pair, "--output", str(output)]
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "teacher_loss", interrupt_at(2))
        assert main(flags) == 130
    damaged = output / name
    damaged.write_bytes(damaged.read_bytes()[:num_bytes])
    assert main(flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {damaged} is damaged (")
    assert error.endswith("): remove it to begin again")
    damaged.unlink()
    assert main(flags) == 0


def test_a_damaged_model_of_a_checkpoint_is_written_again(
    flags_of_pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, whole = tmp_path / "output", tmp_path / "whole"
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "teacher_loss", interrupt_at(STEPS))
        assert main([*flags_of_pair, "--output", str(output)]) == 130
    file = output / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for folder in (output, whole):
        assert main([*flags_of_pair, "--output", str(folder)]) == 0
    found = weights(output)
    assert all(torch.equal(found[name], value) for name, value in weights(whole).items())
