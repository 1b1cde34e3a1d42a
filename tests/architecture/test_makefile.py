"""The rules of the Makefile that install packages, with a Python that only pretends to."""

import shutil
import subprocess
from pathlib import Path

import pytest

WITHOUT_PIP = """
echo "No module named pip" >&2
exit 1
"""
CUDA_BUILD = """
case "$*" in
  *--version) ;;
  *--dry-run*)
    echo "WARNING: Retrying (Retry(total=4)) after connection broken" >&2
    echo "ERROR: Pipe to stdout was broken" >&2
    echo "Collecting nvidia-cublas" ;;
  *) exit 1 ;;
esac
"""


def made(root: Path, folder: Path, python: str) -> "subprocess.CompletedProcess[str]":
    """Run ``make`` for the runtime in a folder whose ``.venv`` has this Python, a shell script."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, folder)
    interpreter = folder / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f"#!/bin/sh\n{python}")
    interpreter.chmod(0o755)
    # The suite itself runs under make, whose variables would change what this one prints.
    without = (f"--unset={name}" for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "SSD_ALLOW_CUDA"))
    return subprocess.run(
        ["env", *without, "make", ".venv/.runtime"],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_environment_without_pip_is_reported_with_the_fix(root: Path, tmp_path: Path) -> None:
    ended = made(root, tmp_path, WITHOUT_PIP)
    assert ended.returncode
    assert ended.stderr.startswith(
        ".venv is incomplete, it has no pip: remove .venv and run make again\n"
    )


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a GPU machine may use CUDA")
def test_the_search_for_a_torch_without_cuda_shows_what_it_waits_for(
    root: Path, tmp_path: Path
) -> None:
    ended = made(root, tmp_path, CUDA_BUILD)
    assert ended.returncode
    assert ended.stdout == "checking which torch pip would install\n"
    warning, error, *_ = ended.stderr.splitlines()
    assert warning.startswith("WARNING: Retrying")
    assert error.startswith("this machine has no GPU, but pip would install torch with several GB")
