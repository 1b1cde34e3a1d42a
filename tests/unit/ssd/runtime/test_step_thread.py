"""The step thread: what it publishes when it loads, fails and ends; its watchdog."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable

import pytest

from ssd.errors import RankError, SetupError
from ssd.runtime.process import place_of
from ssd.runtime.step_thread import StepThread, Watchdog
from ssd.testing.clock import FakeClock

CPUS = frozenset(os.sched_getaffinity(0))
Load = Callable[[], tuple[str, Callable[[], None]]]


async def ended(load: Load) -> StepThread[str]:
    """Return the thread after its end."""
    ends: list[str] = []
    thread = StepThread(load, lambda: ends.append(threading.current_thread().name), CPUS)
    thread.start()
    await asyncio.wait({thread.ended}, timeout=60)
    thread._thread.join(10)
    assert ends == ["step"]
    return thread


def raising(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def failing_load(error: BaseException) -> Load:
    def load() -> tuple[str, Callable[[], None]]:
        raise error

    return load


@pytest.fixture
def unfrozen() -> None:
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
async def test_the_loaded_value_is_published_before_the_thread_serves() -> None:
    num_frozen: list[int] = []
    may_end = threading.Event()

    def serve() -> None:
        num_frozen.append(gc.get_freeze_count())
        assert may_end.wait(10)

    thread = StepThread(lambda: ("model", serve), lambda: None, CPUS)
    thread.start()
    async with asyncio.timeout(60):
        assert await thread.loaded == "model"
        may_end.set()
        await thread.ended
    gc.unfreeze()
    assert num_frozen[0] > 1000, "garbage collection skips what was loaded"


async def test_an_error_while_loading_is_the_result_of_loading() -> None:
    for error in (SetupError("no such model"), ZeroDivisionError("broken on purpose")):
        thread = await ended(failing_load(error))
        assert thread.ended.exception() is None
        assert thread.loaded.exception() is error


async def test_an_error_while_serving_is_the_cause_of_the_end() -> None:
    thread = await ended(lambda: ("model", raising(ZeroDivisionError("broken on purpose"))))
    assert thread.loaded.result() == "model"
    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        thread.ended.result()


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
async def test_a_request_to_exit_on_the_step_thread_is_an_error(error: BaseException) -> None:
    thread = await ended(lambda: ("model", raising(error)))
    with pytest.raises(RuntimeError, match=f"{type(error).__name__} on the step thread") as raised:
        thread.ended.result()
    assert place_of(raised.value).startswith("ssd/runtime/step_thread.py")
    thread = await ended(failing_load(error))
    with pytest.raises(RuntimeError, match="on the step thread"):
        thread.loaded.result()


def stuck(watchdog: Watchdog) -> bool:
    return watchdog.is_stuck


def test_a_step_of_more_than_60_seconds_is_stuck() -> None:
    clock = FakeClock()
    watchdog = Watchdog(clock)
    clock.advance(1000.0)
    assert not stuck(watchdog), "loading has no limit"
    watchdog.heartbeat()
    clock.advance(60.0)
    assert not stuck(watchdog)
    clock.advance(0.1)
    assert stuck(watchdog)
    watchdog.heartbeat()
    assert not stuck(watchdog)


def test_an_idle_thread_is_not_stuck() -> None:
    clock = FakeClock()
    watchdog = Watchdog(clock)
    watchdog.heartbeat()
    with watchdog.idle():
        clock.advance(1000.0)
        assert not stuck(watchdog)
    assert not stuck(watchdog)
    clock.advance(61.0)
    assert stuck(watchdog)


@pytest.mark.usefixtures("unfrozen")
async def test_an_error_of_another_part_ends_a_thread_that_loads_or_serves() -> None:
    may_end, is_loading = threading.Event(), threading.Event()

    def load() -> tuple[str, Callable[[], None]]:
        is_loading.set()
        assert may_end.wait(10)
        return "model", lambda: None

    def serve() -> None:
        assert may_end.wait(10)

    loading = StepThread(load, lambda: None, CPUS)
    serving = StepThread(lambda: ("model", serve), lambda: None, CPUS)
    async with asyncio.timeout(60):
        serving.start()
        await serving.loaded
        loading.start()
        await asyncio.to_thread(is_loading.wait)
        error = RankError("rank 1 has ended")
        loading.fail(error)
        serving.fail(error)
        assert loading.loaded.exception() is error
        assert serving.ended.exception() is error
        may_end.set()
        await asyncio.to_thread(loading._thread.join)
        await asyncio.to_thread(serving._thread.join)
        await asyncio.sleep(0)
    assert loading.ended.exception() is None
    assert serving.ended.exception() is error, "the first cause stays"
