"""Model folders, read without their weights."""

import asyncio
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.screens import Screen

from ssd.engine.config import ModelConfig
from ssd.engine.models.weights import open_weights
from ssd.errors import SetupError, WeightsError
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_cli import app, models
from ssd_cli.app import run
from ssd_cli.display import print_table
from ssd_cli.models import AutoPrecision, auto_precision, local_models, models_table


def found(*roots: Path, hub: Path) -> dict[str, int]:
    models = local_models(roots, hub)
    return {m.name: m.num_parameters for m in models if not m.name.startswith("demo://")}


def test_models_in_and_below_a_folder_are_listed_with_their_parameters(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "models" / "a")
    names = found(tmp_path / "models", tmp_path / "models" / "a", hub=tmp_path / "none")
    attention, mlp, norms = 32 * 32 * 2 + 16 * 32 * 2, 3 * 64 * 32, 2 * 32
    assert names == {str(tmp_path / "models" / "a"): 257 * 32 + 32 + 2 * (attention + mlp + norms)}
    models = local_models([tmp_path / "models"], tmp_path)
    assert models_table(models).row_count == len(models)


def test_a_folder_that_may_not_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_folder(tmp_path / "a")
    (tmp_path / "lost+found").mkdir()
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert list(found(tmp_path, hub=tmp_path / "none")) == [str(tmp_path / "a")]


@pytest.mark.parametrize("width", [40, 60, 120])
def test_names_of_models_are_whole_on_a_narrow_terminal(width: int, tmp_path: Path) -> None:
    screen = Screen(force_terminal=True, width=width, color_system=None)
    print_table(screen, models_table(local_models([], tmp_path)))
    words = screen.text.split()
    assert {"demo://target", "demo://draft", "vocabulary", "parameters"} <= set(words)


def test_downloaded_models_have_the_name_for_the_target_flag(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "models--org--name" / "snapshots" / "abc")
    assert list(found(hub=tmp_path)) == ["hf://org/name@abc"]


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement, which takes seconds."""

    async def precision() -> AutoPrecision:
        return AutoPrecision(dtype="float32", dtype_reason="known")

    monkeypatch.setattr(app, "auto_precision", precision)


def problem_of(folder: Path) -> str:
    (model,) = [each for each in local_models([folder], folder) if each.name == str(folder)]
    return model.problem


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", "{", "config.json: not readable as JSON: Expecting"),
        ("config.json", "[]", "config.json: not a JSON object"),
        ("config.json", '{"model_type": "gpt2"}', "model_type 'gpt2' is not supported; supported"),
        ("config.json", '{"model_type": [1]}', "model_type [1] is not supported"),
        ("config.json", '{"model_type": "llama"}', "config.json lacks 'num_attention_heads'"),
        ("model.safetensors", None, "no .safetensors file in this folder"),
        ("model.safetensors.index.json", "[]", "not a checkpoint index"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "model-2.safetensors"}}',
            "model-2.safetensors is missing; model.safetensors.index.json names it",
        ),
        ("tokenizer.json", "{", "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", None, "no tokenizer.json"),
    ],
)
@pytest.mark.usefixtures("probed")
def test_a_model_that_cannot_run_is_listed_with_its_problem_and_exits_with_1(
    tmp_path: Path, file: str, content: str | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_folder(tmp_path)
    assert problem_of(tmp_path) == ""
    if file.endswith("index.json"):
        (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    assert problem in problem_of(tmp_path)
    assert str(tmp_path) in problem_of(tmp_path)
    assert run(["models", str(tmp_path)]) == 1
    assert f"warning: {problem_of(tmp_path)}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised checkpoints"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": "linear"}, "config.json: "),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json: "),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, must be at least 1"),
        ({"hidden_size": -32}, "hidden_size is -32, must be at least 1"),
        ({"vocab_size": 300}, "has shape [257, 32], not [300, 32]"),
        ({"vocab_size": float("inf")}, "config.json: "),
    ],
)
def test_a_feature_that_the_engines_lack_is_a_problem(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    config = write_tiny_folder(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert problem in problem_of(tmp_path)


UP, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({UP: None}, f": tensor {UP} is missing"),
        ({EMBEDDING: None, "embed_tokens.weight": torch.ones(257, 32)}, f"{EMBEDDING} is missing"),
        ({"extra": torch.ones(1)}, "tensor extra belongs to no layer"),
        ({UP: torch.ones(32, 64)}, f"{UP} has shape [32, 64], not [64, 32]"),
        ({UP: torch.ones(64)}, f"{UP} has shape [64], not [64, 32]"),
        ({UP: torch.ones(64, 32).to(torch.float8_e4m3fn)}, f"{UP} is stored as F8_E4M3"),
    ],
)
def test_weights_that_a_process_refuses_are_a_problem(
    tmp_path: Path, change: dict[str, torch.Tensor | None], problem: str
) -> None:
    file = write_tiny_folder(tmp_path) / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()} | change
    save_file({name: each for name, each in weights.items() if each is not None}, file)
    assert problem in problem_of(tmp_path)
    model = ModelConfig.from_folder(tmp_path)
    with pytest.raises(WeightsError, match=re.escape(problem_of(tmp_path))):
        open_weights(tmp_path, model, torch.float32, "cpu", lambda _fraction: None)


def test_only_what_a_process_reads_is_counted(tmp_path: Path) -> None:
    file = write_tiny_folder(tmp_path) / "model.safetensors"
    expected = found(tmp_path, hub=tmp_path / "none")
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights[EMBEDDING].clone()}, file)
    (tmp_path / "consolidated.safetensors").write_bytes(file.read_bytes())
    assert found(tmp_path, hub=tmp_path / "none") == expected


def test_an_index_beside_the_one_file_of_a_model_is_no_problem(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
    assert problem_of(tmp_path) == ""


def test_a_download_of_another_family_is_left_out(tmp_path: Path) -> None:
    snapshot = write_tiny_folder(tmp_path / "models--org--name" / "snapshots" / "abc")
    (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
    assert found(hub=tmp_path) == {}


@pytest.mark.usefixtures("probed")
def test_a_folder_without_models_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", str(tmp_path)]) == 0
    assert f"warning: {tmp_path} contains no models\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "weights",
    [
        lambda _whole: b"",
        lambda _whole: b"\xff" * 20,
        lambda _whole: b"\x02\0\0\0\0\0\0\0[]",
        lambda _whole: b'\x08\0\0\0\0\0\0\0{"a": 3}',
        lambda whole: whole[:-1],
    ],
)
@pytest.mark.usefixtures("probed")
def test_the_command_warns_about_damaged_and_truncated_weights(
    weights: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tiny_folder(tmp_path) / "model.safetensors"
    file.write_bytes(weights(file.read_bytes()))
    assert run(["models", str(tmp_path)]) == 1
    warning = f"warning: {file}: truncated or not safetensors: "
    assert warning in capsys.readouterr().err


async def test_a_failed_probe_reports_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PROBE", "ssd.no_such_module")
    with pytest.raises(SetupError, match=r"determined: .*No module named ssd\.no_such_module"):
        await auto_precision()


async def test_the_probe_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_user.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(models, "PROBE", "of_a_user")
    with pytest.raises(SetupError, match="No module named of_a_user"):
        await auto_precision()


async def test_a_cancelled_probe_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    (tmp_path / "endless.py").write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(pipe)!r}).write_text(str(os.getpid()))\n"
        "signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(models, "PROBE", "endless")
    probing = asyncio.create_task(auto_precision())
    pid = int(await asyncio.to_thread(pipe.read_text))
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("probed")
def test_a_redirected_table_of_models_has_one_line_for_each_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_folder(tmp_path / ("long" * 30) / "a[v2][")
    assert run(["models", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(str(folder))]
    assert re.search(r"llama +\d+ .* MB *$", line)


@pytest.mark.parametrize("argv", [["models", "--debug"], ["--debug", "models"]])
def test_models_with_debug_shows_the_stack_trace(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def auto_precision() -> None:
        raise SetupError("torch cannot be loaded")

    monkeypatch.setattr(app, "auto_precision", auto_precision)
    assert run(["models"]) == 1
    assert capsys.readouterr().err.endswith("error: torch cannot be loaded\n")
    with pytest.raises(SetupError):
        run(argv)
