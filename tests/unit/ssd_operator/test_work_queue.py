"""Which resource is looked at when."""

import asyncio

import pytest

from ssd_operator import work_queue
from ssd_operator.work_queue import LAST_RETRY_SECONDS, Schedule, WorkQueue


def failed_often() -> Schedule[str]:
    schedule: Schedule[str] = Schedule()
    for _ in range(12):
        schedule.wake("a", 0.0)
        schedule.take(1000.0)
        schedule.fail("a", 0.0)
    return schedule


def test_a_key_that_failed_waits_for_its_retry_whatever_happens() -> None:
    schedule = failed_often()
    schedule.wake("a", 1.0)
    assert schedule.take(LAST_RETRY_SECONDS / 4) is None


def test_a_key_that_was_changed_is_looked_at_at_once() -> None:
    schedule = failed_often()
    schedule.pardon("a")
    schedule.wake("a", 1.0)
    assert schedule.take(2.0) == "a"
    assert schedule.fail("a", 2.0) < 2.0  # and its patience begins anew


async def test_a_pass_that_was_cancelled_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "FIRST_RETRY_SECONDS", 0.0)
    came_again, passes = asyncio.Event(), list[str]()

    async def work(key: str) -> None:
        passes.append(key)
        if len(passes) == 1:
            raise asyncio.CancelledError
        came_again.set()

    clock = asyncio.get_running_loop().time
    queue = WorkQueue(work, num_workers=1, now=clock)
    running = asyncio.ensure_future(queue.run())
    queue.wake("a")
    async with asyncio.timeout(30):
        await came_again.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
