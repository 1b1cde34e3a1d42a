"""Runs checks as child processes, one after the other."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from time import monotonic

from ssd_bench.gpu_check.checks import CHECKS, Check
from ssd_bench.gpu_check.outcome import Environment, Outcome

STDERR_CHARS = 4000
"""Standard error of a crashed check that is searched for its cause."""
MIN_SECONDS = 1.0
"""A check is not started with less time left."""


def run_checks(
    names: Sequence[str],
    environment: Environment,
    limit_seconds: float,
    on_outcome: Callable[[str, Outcome, float], None],
) -> dict[str, Outcome]:
    """Run checks within a limit for all of them, which their budgets divide.

    A check that needs more than its budget uses what those before it have left, never the budgets
    of those after it.

    Args:
        names: of ``CHECKS``, in order.
        environment: device and scratch folder.
        limit_seconds: for all checks.
        on_outcome: called after each check with its name, outcome and duration in seconds.
    """
    began = monotonic()
    budgets = [CHECKS[name].budget_seconds for name in names]
    outcomes: dict[str, Outcome] = {}
    for name, budget in zip(names, accumulate(budgets), strict=True):
        started = monotonic()
        left = began + limit_seconds * budget / sum(budgets) - started
        found = run_in_child(name, environment, left) if left >= MIN_SECONDS else None
        if left < MIN_SECONDS:
            reason = f"its part of the {limit_seconds:.0f} s of all checks is under a second"
            found = Outcome(status="skipped", reason=reason)
        elif found is None:
            reason = f"no result within {left:.0f} s; --limit gives all checks more time"
            found = Outcome(status="timed out", reason=reason)
        outcomes[name] = outcome = _of_peer(CHECKS[name], found)
        on_outcome(name, outcome, monotonic() - started)
    return outcomes


def run_in_child(name: str, environment: Environment, limit_seconds: float) -> Outcome | None:
    """Run one check in its own process.

    Returns:
        None after the limit; the process and its children are killed then.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder) / "outcome.json", Path(folder) / "stderr"
        arguments = (name, environment.device, str(environment.scratch), str(result))
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "ssd_bench.gpu_check.child", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # Its children are in its group, or end with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if result.is_file():
            return Outcome.from_json(result.read_text())
        return Outcome(status="failed", reason=f"ended with {code}: {_last_line(errors)}")


def _last_line(errors: Path) -> str:
    """Return the last line of a crash: of a traceback, its exception."""
    text = errors.read_text(errors="replace")[-STDERR_CHARS:]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _of_peer(check: Check, outcome: Outcome) -> Outcome:
    if check.is_peer and outcome.status in {"failed", "timed out"}:
        return Outcome(status="skipped", reason=f"it {outcome.status}: {outcome.reason}")
    return outcome
