"""Missing extras of the distribution: one line that names the command to install them."""

import sys

import pytest
from tests.unit.ssd_cli.fresh import fresh_python

from ssd.runtime.launch import Deployment
from ssd_cli import extras
from ssd_cli.app import run
from ssd_cli.commands import check_models

HOW = "run 'make setup' in a checkout, or pip install"
WITHOUT_A_MODULE = """
import sys

class Finder:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
import ssd_cli.__main__
"""


@pytest.mark.parametrize("module", ["typer", "rich", "huggingface_hub"])
@pytest.mark.timeout(120)
def test_without_a_package_of_the_command_one_line_names_the_extra(module: str) -> None:
    ended = fresh_python("-c", WITHOUT_A_MODULE.format(module=module))
    wanted = f"error: {module} is not installed: {HOW} 'ssd-serving[cli]'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", wanted)


@pytest.mark.timeout(120)
def test_a_module_that_no_extra_installs_is_a_defect_with_a_stack() -> None:
    assert "Traceback" in fresh_python("-c", WITHOUT_A_MODULE.format(module="grpc")).stderr


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let a module seem not to be installed."""
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name == module else sys.modules[__name__]
    )


NEEDS_TORCH = (["demo"], ["up"], ["check"], ["bench"], ["generate", "x"])


@pytest.mark.parametrize(
    ("argv", "module", "names"),
    [
        *((argv, "torch", "cli,engine") for argv in NEEDS_TORCH),
        (["distill"], "transformers", "cli,engine,distill"),
    ],
)
def test_a_command_without_its_extra_starts_no_process(
    argv: list[str],
    module: str,
    names: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, module)
    assert run(argv) == 1
    wanted = f"error: {module} is not installed: {HOW} 'ssd-serving[{names}]'\n"
    assert capsys.readouterr().err == wanted


def test_a_gateway_needs_its_extra_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "uvicorn")
    check_models(Deployment())
    assert run(["up", "--gateway"]) == 1
    assert f"uvicorn is not installed: {HOW} 'ssd-serving[cli,engine,gateway]'" in (
        capsys.readouterr().err
    )


@pytest.mark.timeout(120)
def test_the_help_of_distill_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "transformers")
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _program, words: started.append(words))
    assert run(["distill", "--help"]) == 0
    ((_python, *words),) = started
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers')); "
    words[words.index("-c") + 1] = code + words[words.index("-c") + 1]
    ended = fresh_python(*words)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--target" in ended.stdout
