"""The command in a Python of its own, which has imported nothing yet."""

import subprocess
import sys
from pathlib import Path

import ssd

SERVICES = Path(ssd.__file__).parents[1]


def fresh_python(*arguments: str, folder: Path = SERVICES) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder; it finds the product in any."""
    return subprocess.run(
        ["env", f"PYTHONPATH={SERVICES}", sys.executable, *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
