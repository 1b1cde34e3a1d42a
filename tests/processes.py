"""A process of the product under test: start it, read its events, stop or kill it.

A process starts as a fork of a server that has already imported torch and the product. The imports
of a cold start take three seconds. It has its own signals, files, sockets and exit code.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

from ssd.observability.log import Event, parse_event
from ssd.observability.scrape import samples
from ssd.runtime.child import PR_SET_PDEATHSIG

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (
    *("env", f"PYTHONPATH={ROOT / 'services'}{os.pathsep}{ROOT / 'operator'}"),
    sys.executable,
)
"""A Python that has imported nothing, and finds the product."""
METRICS_SECONDS = 120.0
_READ_BYTES = 1 << 16


class ProcessUnderTest:
    """One process and the events that were read of its log. Any asyncio loop, one at a time.

    A thread reads its standard error all the time, because a process stops at a full pipe.
    """

    def __init__(self, process: BaseProcess, stderr: Connection) -> None:
        self._process = process
        self._lines: deque[bytes] = deque()
        """Lines that are not yet in ``events``, then an empty one at the end of the log."""
        self._has_lines = os.eventfd(0, os.EFD_NONBLOCK)
        # A descriptor of its own: the caller's is closed at the end of the process.
        log = os.fdopen(os.dup(stderr.fileno()), "rb")
        self._reader = threading.Thread(target=self._read_all, args=(log,), daemon=True)
        self._reader.start()
        self.events: list[Event] = []

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def grpc_address(self) -> str:
        """Where it listens; after ``listening``."""
        return str(next(each for each in self.events if each.name == "listening").fields["grpc"])

    @property
    def http_address(self) -> str:
        """Where its probes listen; after ``listening``."""
        return str(next(each for each in self.events if each.name == "listening").fields["http"])

    async def until(self, name: str) -> Event:
        """Read on to the next event of this name.

        Raises:
            AssertionError: the process ended before it logged one; with its last events.
        """
        while line := await self._read_line():
            if (event := self._record(line)) is not None and event.name == name:
                return event
        raise AssertionError(f"no event {name!r}; the last ones: {self.events[-5:]}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    async def probe(self, path: str) -> tuple[int, str]:
        """Status and text of a page of its HTTP port; after ``listening``."""
        return await asyncio.to_thread(_get, f"http://{self.http_address}{path}")

    async def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics`` by name with labels; after ``listening``."""
        status, page = await self.probe("/metrics")
        assert status == 200, page
        return samples(page)

    async def until_metrics(self, are_so: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Wait until the metrics are so, and return them."""
        async with asyncio.timeout(METRICS_SECONDS):
            while not are_so(metrics := await self.metrics()):
                pass
        return metrics

    async def wait(self) -> int:
        """Return the exit code; what is left on standard error is read into ``events``."""
        while line := await self._read_line():
            self._record(line)
        await _until_readable(self._process.sentinel)
        return _exit_code(self._process)

    def _record(self, line: bytes) -> Event | None:
        event = parse_event(line.decode())
        self.events += [event] if event is not None else []
        return event

    async def _read_line(self) -> bytes:
        """Return the next line of standard error, empty at its end."""
        while not self._lines:
            await _until_readable(self._has_lines)
            os.eventfd_read(self._has_lines)
        # The end stays, for the next caller.
        return self._lines.popleft() if self._lines[0] else b""

    def _read_all(self, log: BinaryIO) -> None:
        with log:
            for line in log:
                self._add(line)
        self._add(b"")

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        os.eventfd_write(self._has_lines, 1)

    def close(self) -> None:
        """Release what reads the log; after the end of the process."""
        self._reader.join()
        os.close(self._has_lines)


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a process."""

    code: int
    stdout: str
    stderr: str


@asynccontextmanager
async def running(module: str, *flags: str) -> AsyncIterator[ProcessUnderTest]:
    """Start ``python -m MODULE FLAGS``; it is killed at the end, if it still runs."""
    with _process_under_test(["-m", module, *flags]) as process:
        yield process


@asynccontextmanager
async def running_code(code: str, *flags: str) -> AsyncIterator[ProcessUnderTest]:
    """Start ``python -c CODE FLAGS``; it is killed at the end, if it still runs."""
    with _process_under_test(["-c", code, *flags]) as process:
        yield process


@contextmanager
def _process_under_test(arguments: Sequence[str]) -> Iterator[ProcessUnderTest]:
    with contextlib.ExitStack() as after_the_end, _started(arguments) as (process, _, stderr):
        found = ProcessUnderTest(process, stderr)
        after_the_end.callback(found.close)
        yield found


def completed(module: str, *flags: str) -> Ended:
    """Run ``python -m MODULE FLAGS`` to its end; it writes little (a pipe holds 64 KiB)."""
    with _started(["-m", module, *flags]) as (process, stdout, stderr):
        process.join()
        out, err = (os.read(each.fileno(), _READ_BYTES).decode() for each in (stdout, stderr))
        return Ended(_exit_code(process), out, err)


def start_fork_server() -> None:
    """Start the server of processes, and its resource tracker; no effect while they run."""
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    # The server looks for the module here.
    with contextlib.chdir(ROOT):
        forkserver.ensure_running()


@contextmanager
def _started(
    arguments: Sequence[str],
) -> Iterator[tuple[BaseProcess, Connection, Connection]]:
    """Start Python with arguments; yields the process, its standard output and error."""
    context = multiprocessing.get_context("forkserver")
    start_fork_server()
    with contextlib.ExitStack() as stack:
        out, their_out, err, their_err = (
            stack.enter_context(each) for _ in range(2) for each in context.Pipe(duplex=False)
        )
        outputs = (their_out, their_err)
        process = context.Process(target=_become, args=(arguments, outputs, dict(os.environ)))
        # The process begins in the current folder.
        with contextlib.chdir(ROOT):
            process.start()
        their_out.close()
        their_err.close()
        try:
            yield process, out, err
        finally:
            process.kill()
            process.join()
            process.close()


def _become(
    arguments: Sequence[str], outputs: Sequence[Connection], variables: Mapping[str, str]
) -> None:
    """Run ``python ARGUMENTS`` in this process. It ends when its fork server ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), descriptor)
        output.close()
    os.environ.clear()
    os.environ.update(variables)
    option, code, *flags = arguments
    sys.argv = [code if option == "-m" else option, *flags]
    try:
        if option == "-m":
            runpy.run_module(code, run_name="__main__", alter_sys=True)
        else:
            exec(code, {"__name__": "__main__"})
    except Exception:  # noqa: BLE001 - reported as Python reports it at the end of a program
        # ``multiprocessing`` does not call the hook.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _exit_code(process: BaseProcess) -> int:
    """Return the exit code of a process that has ended."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


async def _until_readable(descriptor: int) -> None:
    """Wait for something to read, or the other end's close."""
    is_readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _get(url: str) -> tuple[int, str]:
    try:
        answer = urllib.request.urlopen(url)
    except urllib.error.HTTPError as refusal:
        answer = refusal
    with answer:
        return answer.status, answer.read().decode()
