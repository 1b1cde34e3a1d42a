"""SIGTERM and SIGINT during the start of a process."""

import asyncio
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.model_folders import model_folder
from tests.pairs import ANY_PORT, QUICK
from tests.processes import PYTHON, running_code

from ssd.observability.log import parse_event

LOADS_IN_A_LIBRARY = """
import runpy
import torch
from ssd_target import step_thread
from ssd.observability.log import log_progress

def load_runner(*arguments):
    log_progress("load", 0.0)
    matrix = torch.ones(100, 100)
    while True:
        matrix @ matrix

step_thread.load_runner = load_runner
runpy.run_module("ssd_target", run_name="__main__", alter_sys=True)
"""
DOWNLOADS = """
import runpy, threading
import {module}
from ssd.observability.log import get_logger

def find(*arguments, **options):
    get_logger("ssd").info("downloading")
    threading.Event().wait()

{module}.{function} = find
runpy.run_module("{package}", run_name="__main__", alter_sys=True)
"""
ENDS_BESIDE_A_LIBRARY = """
import asyncio, os, sys, threading
import torch
from ssd import errors
from ssd.fetch import FetchSettings
from ssd.runtime.process import exit_process, run_process
from ssd.runtime.step_thread import StepThread

begun = threading.Event()

def load():
    matrix = torch.ones(100, 100)
    while True:
        matrix @ matrix
        begun.set()

async def serve(settings):
    StepThread(load, lambda: None, os.sched_getaffinity(0)).start()
    await asyncio.to_thread(begun.wait)
    raise eval(sys.argv.pop())("on purpose")

flags = ["--model", "hf://org/name@" + 40 * "0"]
exit_process(run_process("fetch", FetchSettings, serve, lambda settings: None, flags))
"""
folder = model_folder(seed=1)


def catches_sigterm(process: "subprocess.Popen[str]") -> bool:
    """Whether the process handles the signal. As process 1 it does not receive it otherwise."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("module", ["ssd_target", "ssd_draft", "ssd_operator"])
def test_sigterm_during_the_imports_ends_the_process_at_once(module: str) -> None:
    command = [*PYTHON, "-v", "-m", module]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, pipesize=4096, text=True)
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


def started(code: str, *flags: str) -> "subprocess.Popen[str]":
    """Start Python. A fork, as in other tests, would end without the interpreter's shutdown."""
    return subprocess.Popen([*PYTHON, "-c", code, *flags], stderr=subprocess.PIPE, text=True)


def names(lines: Iterable[str]) -> Iterator[str]:
    """Yield the events of a log; an empty name for any other line."""
    for line in lines:
        event = parse_event(line)
        yield event.name if event is not None else ""


def test_sigterm_while_a_library_loads_the_model_ends_the_process_with_0(folder: Path) -> None:
    with started(LOADS_IN_A_LIBRARY, "--model", str(folder), *ANY_PORT, *QUICK) as process:
        try:
            assert process.stderr is not None
            events = names(process.stderr)
            assert "progress" in events
            process.send_signal(signal.SIGTERM)
            assert list(events)[-1] == "stopped"
            assert process.wait() == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("package", "module", "function", "number"),
    [
        ("ssd_target", "ssd_target.models", "find_models", signal.SIGTERM),
        ("ssd_draft", "ssd.model_files.local_model", "find_model", signal.SIGINT),
    ],
)
async def test_a_signal_while_the_model_is_downloaded_ends_the_process_at_once(
    package: str, module: str, function: str, number: signal.Signals
) -> None:
    code = DOWNLOADS.format(package=package, module=module, function=function)
    async with running_code(code, "--model", "hf://org/name", *ANY_PORT) as process:
        await process.until("downloading")
        process.signal(number)
        async with asyncio.timeout(30):
            assert await process.wait() == 0


@pytest.mark.parametrize(("end", "code"), [("errors.SettingsError", 78), ("ZeroDivisionError", 1)])
def test_a_process_keeps_its_exit_code_while_its_step_thread_runs(end: str, code: int) -> None:
    with started(ENDS_BESIDE_A_LIBRARY, end) as process:
        try:
            assert process.stderr is not None
            assert list(names(process.stderr)) == ["failed"]
            assert process.wait() == code
        finally:
            process.kill()
