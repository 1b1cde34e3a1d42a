"""The extra ``vllm`` in the environment of a user."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
ENVIRONMENT = Path(__file__).parents[2] / ".venv-vllm"


def test_the_extra_changes_no_package_of_vllm() -> None:
    before = set((ENVIRONMENT / "packages.txt").read_text().splitlines())
    command = [str(ENVIRONMENT / "bin/python"), "-m", "pip", "freeze", "--exclude-editable"]
    after = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert before - after == set()
    assert {line.partition("==")[0].replace("_", "-") for line in after - before} <= {
        "grpcio-health-checking",
        "grpcio-reflection",
    }
