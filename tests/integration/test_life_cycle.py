"""The life cycle of a process around a real step thread and real ports."""

import asyncio
import os
import threading

import pytest

from ssd.engine_settings import EngineSettings
from ssd.rpc.call_guard import ServerLimits
from ssd.runtime import life_cycle as module
from ssd.runtime.life_cycle import LifeCycle
from ssd.runtime.step_thread import StepThread, Watchdog
from ssd.testing.clock import FakeClock

ANY_PORTS = EngineSettings(model="m", port=0, http_port=0)


class Process:
    """A process whose only work is a counter; its step thread ends when its inbox is closed."""

    def __init__(self, drain_seconds: float = 3600.0) -> None:
        self.clock = FakeClock()
        self.watchdog = Watchdog(self.clock)
        self.may_load = threading.Event()
        self.inbox_closed = threading.Event()
        self.serve_error: Exception | None = None
        self.is_idle = asyncio.Event()
        self.closes_inbox = True
        self.calls: list[str] = []
        cpus = os.sched_getaffinity(0)
        self.step = StepThread(self._load, self.inbox_closed.set, cpus)
        self.life = LifeCycle(self.step, self.watchdog, self.clock, drain_seconds)

    async def run(self) -> None:
        async with self.life.listening("draft", ANY_PORTS, (), ServerLimits()):
            model = await self.life.load()
            if model is not None:
                await self.life.serve(self._finish, self._stop)

    async def until_ready(self) -> None:
        self.may_load.set()
        async with asyncio.timeout(60):
            while not self.life.readiness()[0]:  # noqa: ASYNC110 - readiness has no event
                await asyncio.sleep(0)

    def _load(self) -> tuple[str, "Process"]:
        assert self.may_load.wait(10)
        return "model", self

    def __call__(self) -> None:
        """Serve."""
        if self.serve_error is not None:
            raise self.serve_error
        assert self.inbox_closed.wait(10)

    async def _finish(self) -> None:
        self.calls.append("finish")
        await self.is_idle.wait()

    async def _stop(self) -> None:
        self.calls.append("stop")
        if self.closes_inbox:
            self.inbox_closed.set()


async def test_a_process_loads_serves_and_drains() -> None:
    process = Process()
    run = asyncio.create_task(process.run())
    await asyncio.sleep(0)
    assert process.life.readiness() == (False, "loading")
    await process.until_ready()
    assert process.life.readiness() == (True, "ready")
    process.life.start_draining()
    assert process.life.readiness() == (False, "draining")
    process.is_idle.set()
    async with asyncio.timeout(60):
        await run
    assert process.calls == ["finish", "stop"]
    assert process.life.readiness() == (False, "the step thread has ended")


async def test_a_crash_of_the_step_thread_ends_the_process() -> None:
    process = Process()
    process.serve_error = ZeroDivisionError("broken on purpose")
    process.may_load.set()
    async with asyncio.timeout(60):
        with pytest.raises(ZeroDivisionError, match="broken on purpose"):
            await process.run()
    assert not process.life.is_live()
    assert process.calls == []


async def test_the_first_limit_of_a_drain_counts() -> None:
    process = Process()
    process.life.start_draining(0.0)
    process.life.start_draining(3600.0)
    assert process.life._drain_seconds == 0.0
    process = Process(drain_seconds=30.0)
    process.life.start_draining()
    process.life.start_draining(0.0)
    assert process.life._drain_seconds == 30.0


async def test_a_step_thread_that_outlives_the_drain_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.0)
    process = Process()
    process.closes_inbox = False
    process.is_idle.set()
    run = asyncio.create_task(process.run())
    await process.until_ready()
    process.life.start_draining()
    with pytest.raises(TimeoutError, match="the step thread did not end within 0 s"):
        await run
    process.inbox_closed.set()
    async with asyncio.timeout(60):
        await process.step.ended


async def test_a_process_is_live_while_its_step_thread_makes_progress() -> None:
    process = Process()
    assert process.life.is_live()
    process.watchdog.heartbeat()
    process.clock.advance(61.0)
    assert not process.life.is_live()
    with process.watchdog.idle():
        assert process.life.is_live()
