"""SIGTERM during the start of a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ssd
import ssd_operator

PATHS = os.pathsep.join(
    str(Path(str(package.__file__)).parent.parent) for package in (ssd, ssd_operator)
)


def catches_sigterm(process: "subprocess.Popen[str]") -> bool:
    """Whether the process handles the signal. As process 1 it does not receive it otherwise."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("module", ["ssd_target", "ssd_draft", "ssd_operator"])
def test_sigterm_during_the_imports_ends_the_process_at_once(module: str) -> None:
    process = subprocess.Popen(
        ["env", f"PYTHONPATH={PATHS}", sys.executable, "-v", "-m", module],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stderr is not None
            imported = [next(process.stderr)]
            # The pipe is small, so the process cannot run far beyond the line that is read here.
            while not catches_sigterm(process):
                imported.append(next(process.stderr))
            process.send_signal(signal.SIGTERM)
            imported += process.stderr
            assert process.wait() == 0
        finally:
            process.kill()
    assert not any("'asyncio'" in line or "import 'torch" in line for line in imported)
