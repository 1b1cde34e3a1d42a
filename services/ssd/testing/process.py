"""A process of the product under test: start it, read its events, stop or kill it."""

import asyncio
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ssd.telemetry import Event, parse_event

_SERVICES = Path(__file__).parents[2]
_EVENT_SECONDS = 40.0


class ProcessUnderTest:
    """``python -m MODULE FLAGS`` and what it has said so far. Asyncio loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: list[Event] = []

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
            AssertionError: the process ended before it said so; with what it said last.
        """
        assert self._process.stderr is not None
        async with asyncio.timeout(_EVENT_SECONDS):
            while line := await self._process.stderr.readline():
                event = parse_event(line.decode())
                if event is not None:
                    self.events.append(event)
                    if event.name == name:
                        return event
        raise AssertionError(f"no event {name!r}; the last ones: {self.events[-5:]}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def probe(self, path: str) -> tuple[int, str]:
        """Status and text of a page of its HTTP port; after ``listening``."""
        return await asyncio.to_thread(_get, f"http://{self.http_address}{path}")

    async def wait(self) -> int:
        """Exit code; what is left on standard error is read into ``events``."""
        async with asyncio.timeout(_EVENT_SECONDS):
            assert self._process.stderr is not None
            for line in (await self._process.stderr.read()).splitlines():
                event = parse_event(line.decode())
                self.events += [event] if event is not None else []
            return await self._process.wait()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url) as answer:  # noqa: S310 - our own address
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


@asynccontextmanager
async def running(module: str, *flags: str) -> AsyncIterator[ProcessUnderTest]:
    """Start a process; it is killed at the end, if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *flags,
        cwd=_SERVICES,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield ProcessUnderTest(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
