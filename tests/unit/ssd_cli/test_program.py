"""The name of the program in hints, and the end of a pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.ssd_cli.fresh import SERVICES, fresh_python

from ssd_cli.app import run

pytestmark = pytest.mark.timeout(120)
"""Processes that import the whole command: seconds on a busy machine."""


@pytest.mark.parametrize("argv", [["plan"], ["bench", "--help"]])
def test_a_reader_that_closes_the_pipe_ends_a_command_with_the_status_of_sigpipe(
    argv: list[str],
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as output:  # noqa: PTH123 - a descriptor
        ended = subprocess.run(
            ["env", f"PYTHONPATH={SERVICES}", sys.executable, "-m", "ssd_cli", *argv],
            check=False,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ended.returncode, ended.stderr) == (141, "")


def test_hints_name_the_program_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ssd"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(["genrate"]) == 2
    assert f"(see: {program} --help)" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["genrate"]) == 2
    assert "(see: ssd --help)" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["/some/ssd_cli/__main__.py"])
    assert run(["genrate"]) == 2
    assert "(see: python -m ssd_cli --help)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["bench", "--widen-target", "3"], "--widen-target 3: choose one of"),
        (["distill", "--data", "x"], "Missing option"),
    ],
)
def test_another_program_has_the_name_of_its_command_in_errors(
    argv: list[str], problem: str
) -> None:
    ended = fresh_python("-m", "ssd_cli", *argv)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert problem in ended.stderr
    assert f"(see: python -m ssd_cli {argv[0]} --help)" in ended.stderr


def test_another_program_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('a file of the user')")
    ended = fresh_python("-P", "-m", "ssd_cli", "bench", "--no-such-flag", folder=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "--no-such-flag" in ended.stderr
