"""Runs each check in a process of its own, prints and writes the results.

A crash, a hang or a full time limit ends one check only.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from tests.gpu.environment import CHECKS, NO_GPU, PEER, Figures, Outcome
from tests.gpu.targets import verdicts

STDERR_CHARS = 4000
"""Output of a crashed check that is searched for its cause."""
MIN_SECONDS = 1.0
"""A check is not started with less time left."""
COLOURS = {"passed": "green", "failed": "red", "met": "green", "not met": "red"}


class Recorder:
    """Writes the outcome of the check of this process; until its end, that is ``timed out``."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcome = Outcome(status="timed out")
        self.figures = Figures(self._write)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what is known after the set-up, the test and its end."""
        if report.outcome != "passed":
            self._outcome = Outcome(status=report.outcome, reason=reason_of(report))
        elif report.when == "teardown" and self._outcome.status == "timed out":
            self._outcome = Outcome(status="passed")
        self._write()

    def _write(self) -> None:
        # asdict would make another object of the class of the figures.
        write_json(self._file, asdict(replace(self._outcome, figures=dict(self.figures))))


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Write a file; a process that is killed leaves the old contents or the new ones."""
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(json.dumps(document, indent=2) + "\n")
    unfinished.replace(file)


def reason_of(report: pytest.TestReport) -> str:
    """Return why a check did not pass, on one line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(report.longrepr) if crash is None else str(crash.message)
    return message.strip().partition("\n")[0].removeprefix("AssertionError: ")


class Supervisor:
    """Runs the checks of a session in place of pytest. The flags are those of ``conftest``.

    Raises:
        pytest.UsageError: a folder cannot be written, the file of the results has something else,
            or there is no GPU.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._options = config.option
        for flag, folder in (
            ("output", self._options.output.absolute().parent),
            ("scratch", self._options.scratch),
        ):
            if folder is not None and not os.access(folder, os.W_OK):
                raise pytest.UsageError(f"--{flag}: the folder {folder} cannot be written")
        if self._options.on == "cuda" and not torch.cuda.is_available():
            raise pytest.UsageError(NO_GPU)
        self._console = Console(highlight=False, soft_wrap=True)
        self._outcomes: dict[str, Outcome] = {}
        self._earlier: Mapping[str, Outcome] = {}
        if only := self._options.only:
            kept = read_outcomes(self._options.output, self._options.on)
            self._earlier = {name: each for name, each in kept.items() if name not in only}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the checks that are selected, in their order."""
        device = f"[{self._options.on}]"
        found = {name_of(item): item for item in items if item.name.endswith(device)}
        chosen = self._options.only or CHECKS
        items[:] = [found[name] for name in CHECKS if name in chosen and name in found]

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the checks, then print the tables."""
        if session.testsfailed:
            return None
        # A SIGTERM too ends the processes of the check that runs.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        checks = {name: item for item in session.items if (name := name_of(item))}
        try:
            with tempfile.TemporaryDirectory(dir=self._options.scratch) as scratch:
                for name, outcome in outcomes(checks, self._options.limit, Path(scratch)):
                    self._outcomes[name] = outcome
                    self._show(name, outcome)
                    self._write(is_complete=len(self._outcomes) == len(checks))
        except KeyboardInterrupt:
            self._write(is_complete=False)
            done = f"interrupted after {len(self._outcomes)} of {len(checks)} checks"
            pytest.exit(done, returncode=130)
        self._console.print(table(self._outcomes))
        self._console.print()
        self._console.print(target_table(self._all_outcomes(), self._options.on))
        self._console.print(f"written: {self._options.output}")
        session.testsfailed = sum(
            each.status in ("failed", "timed out") for each in self._outcomes.values()
        )
        return True

    def _show(self, name: str, outcome: Outcome) -> None:
        reason = f": {outcome.reason}" if outcome.reason else ""
        lines = [f"{name}: {outcome.status} ({outcome.seconds:.0f} s){reason}"]
        for figure, value in outcome.figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            lines.append(f"  {figure:<40} {shown}")
        self._console.print("\n".join(lines), markup=False)

    def _all_outcomes(self) -> dict[str, Outcome]:
        """Return the outcomes of this run and, with ``--only``, of other checks before it."""
        found = {**self._earlier, **self._outcomes}
        return {name: found[name] for name in CHECKS if name in found}

    def _write(self, *, is_complete: bool) -> None:
        output: Path = self._options.output
        document = as_json(self._all_outcomes(), self._options.on, is_complete=is_complete)
        write_json(output, document)


def name_of(item: pytest.Item) -> str:
    """Return the name of a check; empty for another test."""
    mark = item.get_closest_marker("check")
    return "" if mark is None else str(mark.args[0])


def outcomes(
    checks: Mapping[str, pytest.Item], limit_seconds: float, scratch: Path
) -> Iterator[tuple[str, Outcome]]:
    """Run checks within a limit for all of them, which the seconds of ``CHECKS`` divide.

    A check that needs more than its part uses what those before it have left, never the parts of
    those after it. A peer that fails is skipped.
    """
    began = monotonic()
    total = sum(CHECKS[name] for name in checks)
    for name, part in zip(checks, accumulate(CHECKS[name] for name in checks), strict=True):
        started = monotonic()
        left = began + limit_seconds * part / total - started
        if left < MIN_SECONDS:
            reason = f"its part of the {limit_seconds:.0f} s of all checks is under a second"
            found = Outcome(status="skipped", reason=reason)
        else:
            found = run_apart(command_of(checks[name], scratch), left)
        if name.startswith(PEER) and found.status in ("failed", "timed out"):
            reason = f"it {found.status}: {found.reason}"
            found = replace(found, status="skipped", reason=reason)
        yield name, replace(found, seconds=round(monotonic() - started, 1))


def command_of(check: pytest.Item, scratch: Path) -> list[str]:
    """Return the command that runs one check; its last flag needs the file of the outcome."""
    test = f"{check.path}::{check.nodeid.partition('::')[2]}"
    ini = str(check.config.inipath)
    return [sys.executable, "-m", "pytest", test, "-c", ini, "--scratch", f"{scratch}", "--outcome"]


def run_apart(command: Sequence[str], limit_seconds: float) -> Outcome:
    """Run one check in its own process; kill it and its children after the limit.

    Args:
        command: gets the name of the file in which it writes the outcome.
        limit_seconds: maximum duration.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder) / "outcome.json", Path(folder) / "output"
        with errors.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Its children are in its group, or end with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = Outcome(status="timed out")
        if result.is_file():
            found = Outcome(**json.loads(result.read_text()))
        if code is None and found.status != "failed":
            reason = f"no result within {limit_seconds:.0f} s; --limit gives all more time"
            return replace(found, status="timed out", reason=reason)
        if found.status != "timed out":
            return found
        # Of a traceback, the last line is its exception.
        lines = errors.read_text(errors="replace")[-STDERR_CHARS:].splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return replace(found, status="failed", reason=f"ended with {code}: {last}")


def as_json(found: Mapping[str, Outcome], device: str, *, is_complete: bool) -> dict[str, Any]:
    """Return the document of ``gpu_check.json``; it is complete if all chosen checks have ended."""
    return {
        "device": device,
        "is_complete": is_complete,
        "targets": [asdict(each) for each in verdicts(found, device)],
        "checks": {name: asdict(outcome) for name, outcome in found.items()},
    }


def read_outcomes(file: Path, device: str) -> dict[str, Outcome]:
    """Return the outcomes of earlier runs on a device, without checks that no longer exist.

    Raises:
        pytest.UsageError: the file is not one of ``as_json``.
    """
    if not file.is_file():
        return {}
    try:
        document = json.loads(file.read_text())
        checks = document["checks"] if document["device"] == device else {}
        return {name: Outcome(**each) for name, each in checks.items() if name in CHECKS}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise pytest.UsageError(
            f"--output: {file} has no results of this command; remove it, or name another file"
        ) from error


def table(found: Mapping[str, Outcome]) -> Table:
    """Return the summary."""
    result = _table("check", "result", "s", "reason")
    for name, each in found.items():
        result.add_row(name, _coloured(each.status), f"{each.seconds:.0f}", each.reason)
    return result


def target_table(found: Mapping[str, Outcome], device: str) -> Table:
    """Return the speed targets: the number, the bound, and whether it is met."""
    result = _table("speed target", "bound", "number", "result", "reason")
    for each in verdicts(found, device):
        number = "" if each.value is None else f"{each.value:.4g}"
        result.add_row(each.target, each.bound, number, _coloured(each.result), each.reason)
    return result


def _table(*titles: str) -> Table:
    result = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        result.add_column(title, overflow="fold")
    return result


def _coloured(status: str) -> str:
    return f"[{COLOURS.get(status, 'yellow')}]{status}[/]"
