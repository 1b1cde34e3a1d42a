"""CPUs, hand-overs to a loop that may be gone, and the one life of a step thread."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable

import pytest

from ssd.errors import SettingsError, SetupError
from ssd.process import StepThread, pin, post

HERE = frozenset(os.sched_getaffinity(0))


def test_a_cpu_that_is_not_allowed_is_named() -> None:
    beyond = max(HERE) + 1
    with pytest.raises(SettingsError, match=str(beyond)):
        pin(frozenset({beyond}), frozenset())
    with pytest.raises(SettingsError, match=str(beyond)):
        pin(frozenset(), frozenset({beyond}))
    assert os.sched_getaffinity(0) == HERE


def test_the_step_thread_has_all_cpus_unless_told_otherwise() -> None:
    one = frozenset({min(HERE)})
    try:
        assert pin(frozenset(), one) == HERE
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, HERE)
    assert pin(one, frozenset()) == one


def test_a_closed_loop_is_told_nothing_and_nobody_fails() -> None:
    loop = asyncio.new_event_loop()
    told: list[int] = []
    post(loop, told.append, 1)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    post(loop, told.append, 2)
    assert told == [1]


async def live(load: Callable[[], tuple[str, Callable[[], None]]]) -> tuple[StepThread[str], bool]:
    ends: list[str] = []
    thread = StepThread(load, lambda: ends.append(threading.current_thread().name), HERE)
    thread.start()
    async with asyncio.timeout(10):
        ended_well = await thread.ended
    thread._thread.join(10)
    assert ends == ["step"]
    return thread, ended_well


@pytest.fixture
def thawed() -> None:
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
async def test_what_is_loaded_is_announced_before_it_serves() -> None:
    served: list[int] = []
    thread, ended_well = await live(lambda: ("model", lambda: served.append(gc.get_freeze_count())))
    gc.unfreeze()
    assert thread.loaded.result() == "model"
    assert ended_well
    assert served[0] > 1000, "what was loaded is out of the collector's way"


async def test_a_set_up_that_fails_is_the_reason() -> None:
    def load() -> tuple[str, Callable[[], None]]:
        raise SetupError("no such model")

    thread, ended_well = await live(load)
    assert not ended_well
    with pytest.raises(SetupError, match="no such model"):
        thread.loaded.result()


async def test_a_crash_ends_the_thread_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    crashes: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", crashes.append)

    def crash() -> None:
        raise ZeroDivisionError

    thread, ended_well = await live(lambda: ("model", crash))
    assert not ended_well
    assert thread.loaded.result() == "model"
    assert crashes[0].exc_type is ZeroDivisionError
