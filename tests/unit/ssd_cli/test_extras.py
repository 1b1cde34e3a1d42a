"""Missing extras of the distribution: one line that names the command to install them."""

import subprocess
import sys
from pathlib import Path

import pytest

import ssd
from ssd.runtime.launch import Deployment
from ssd_cli import extras
from ssd_cli.app import run
from ssd_cli.commands import check_models

WITHOUT_A_MODULE = """
import sys

class Finder:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
import ssd_cli.__main__
"""


def started_without(module: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_A_MODULE.format(module=module)],
        cwd=Path(ssd.__file__).parents[1],
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("module", ["typer", "rich", "huggingface_hub"])
def test_without_a_package_of_the_command_one_line_names_the_extra(module: str) -> None:
    ended = started_without(module)
    wanted = f"error: {module} is not installed: pip install 'ssd-serving[cli]'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", wanted)


def test_a_module_that_no_extra_installs_is_a_defect_with_a_stack() -> None:
    assert "Traceback" in started_without("grpc").stderr


@pytest.mark.parametrize("argv", [["demo"], ["up"], ["check"], ["bench"], ["generate", "x"]])
def test_without_torch_no_process_is_started(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name == "torch" else sys.modules[__name__]
    )
    assert run(argv) == 1
    assert capsys.readouterr().err == (
        "error: torch is not installed: pip install 'ssd-serving[cli,engine]'\n"
    )


def test_training_needs_its_extra_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name == "transformers" else sys.modules[__name__]
    )
    assert run(["distill", "--help"]) == 1
    assert capsys.readouterr().err == (
        "error: transformers is not installed: pip install 'ssd-serving[cli,engine,distill]'\n"
    )


def test_a_gateway_needs_its_extra_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name == "uvicorn" else sys.modules[__name__]
    )
    check_models(Deployment())
    assert run(["up", "--gateway"]) == 1
    assert "uvicorn is not installed: pip install 'ssd-serving[cli,engine,gateway]'" in (
        capsys.readouterr().err
    )
