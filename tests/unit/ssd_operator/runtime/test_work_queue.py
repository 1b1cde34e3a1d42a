"""Which resource has a pass when."""

import asyncio

import pytest

from ssd_operator.observe.cluster import Key
from ssd_operator.runtime import work_queue
from ssd_operator.runtime.work_queue import (
    LAST_RETRY_SECONDS,
    LONGEST_SETTLE_SECONDS,
    Schedule,
    WorkQueue,
)

KEY: Key = ("here", "a")


def failed_often() -> Schedule:
    schedule = Schedule()
    for _ in range(12):
        schedule.wake(KEY, 0.0)
        schedule.take(1000.0)
        schedule.fail(KEY, 0.0)
    return schedule


def test_a_key_that_failed_waits_for_its_retry_whatever_happens() -> None:
    schedule = failed_often()
    schedule.wake(KEY, 1.0)
    assert schedule.take(LAST_RETRY_SECONDS / 4) is None


def test_a_key_that_was_changed_does_not_wait_for_its_retry() -> None:
    schedule = failed_often()
    schedule.change(KEY, 1.0)
    assert schedule.take(2.0) == KEY
    assert schedule.fail(KEY, 2.0) < 2.0  # and its back-off begins again


def passes(schedule: Schedule, times: list[float]) -> list[float]:
    """When passes begin, of a queue that is read at these times."""
    found = []
    for now in times:
        if schedule.take(now) is not None:
            found.append(now)
            schedule.finish(KEY, now, None)
    return found


def test_changes_within_a_second_are_one_pass() -> None:
    schedule = Schedule()
    begun = []
    for number in range(21):
        schedule.change(KEY, number / 4)
        schedule.wake(KEY, number / 4 + 0.1)  # a pod of it changes, too
        begun += passes(schedule, [number / 4 + 0.2])
    assert begun == []
    assert passes(schedule, [5.9, 6.0, 6.1, 7.0]) == [6.0]


def test_changes_that_do_not_end_are_not_waited_for() -> None:
    schedule = Schedule()
    for number in range(80):
        schedule.change(KEY, number / 4)
        if passes(schedule, [number / 4]):
            break
    assert number / 4 == LONGEST_SETTLE_SECONDS


def test_a_change_during_a_pass_is_a_pass_of_its_own() -> None:
    schedule = Schedule()
    schedule.change(KEY, 0.0)
    assert schedule.take(1.0) == KEY
    schedule.change(KEY, 1.5)
    schedule.finish(KEY, 2.0, 0.0)
    assert passes(schedule, [2.1, 2.4, 2.5, 9.0]) == [2.5]


async def test_a_pass_that_was_cancelled_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "FIRST_RETRY_SECONDS", 0.0)
    came_again, passes = asyncio.Event(), list[Key]()

    async def work(key: Key) -> None:
        passes.append(key)
        if len(passes) == 1:
            raise asyncio.CancelledError
        came_again.set()

    clock = asyncio.get_running_loop().time
    queue = WorkQueue(work, num_workers=1, now=clock)
    running = asyncio.ensure_future(queue.run())
    queue.wake(KEY)
    async with asyncio.timeout(30):
        await came_again.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
