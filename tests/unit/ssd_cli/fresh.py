"""The command in a Python of its own, which has imported nothing yet."""

import subprocess
import sys
from pathlib import Path

import ssd


def fresh_python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(ssd.__file__).parents[1],
        check=False,
        capture_output=True,
        text=True,
    )
