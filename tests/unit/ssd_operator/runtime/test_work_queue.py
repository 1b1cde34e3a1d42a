"""Which resource has a pass when, in virtual time."""

import asyncio
import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from tests.unit.ssd_operator.virtual_time import in_virtual_time, now, pass_by

from ssd.observability.log import JsonFormatter, get_logger
from ssd_operator.observe.cluster import BusyError, Key
from ssd_operator.policy.back_off import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS
from ssd_operator.runtime import metrics
from ssd_operator.runtime.work_queue import (
    LONGEST_SETTLE_SECONDS,
    PARTIAL_SECONDS,
    RESYNC_SECONDS,
    PartialError,
    WorkQueue,
)

KEY: Key = ("here", "a")
OTHER: Key = ("here", "b")


@dataclass
class Passes:
    """Passes as they begin. Each takes a while, and has the next of these ends."""

    ends: Sequence[BaseException | float | None] = ()
    seconds: float = 0.0
    begun: list[tuple[Key, float]] = field(default_factory=list)

    async def work(self, key: Key) -> float | None:
        self.begun.append((key, now()))
        number = len(self.begun)
        await pass_by(self.seconds)
        end = self.ends[min(number, len(self.ends)) - 1] if self.ends else None
        if isinstance(end, BaseException):
            raise end
        return end

    def queue(self, num_workers: int = 1) -> WorkQueue:
        queue = WorkQueue(self.work, num_workers)
        queue.start()
        return queue

    @property
    def times(self) -> list[float]:
        return [time for _, time in self.begun]


def oldest_success() -> float:
    name = "ssd_operator_oldest_success_seconds"
    return metrics.REGISTRY.get_sample_value(name) or 0.0


async def at(time: float) -> None:
    await pass_by(time - now())


@in_virtual_time
async def test_events_that_come_together_are_one_pass() -> None:
    passes = Passes()
    queue = passes.queue()
    for _ in range(3):
        queue.wake(KEY)
    await at(60.0)
    assert len(passes.begun) == 1


@in_virtual_time
async def test_no_pass_begins_before_all_is_listed() -> None:
    passes = Passes()
    queue = WorkQueue(passes.work, 1)
    queue.wake(KEY)
    await at(1000.0)
    assert (passes.begun, queue.longest_wait_seconds()) == ([], 0.0)
    queue.start()
    await at(1001.0)
    assert passes.times == [1000.0]


@in_virtual_time
async def test_no_pass_begins_after_the_queue_was_closed() -> None:
    passes = Passes()
    queue = passes.queue()
    await queue.close()
    queue.wake(KEY)  # as engine tasks do when they end
    await at(60.0)
    assert passes.begun == []


@in_virtual_time
async def test_a_resource_without_events_has_a_pass_from_time_to_time_until_it_is_gone() -> None:
    passes = Passes(ends=[1000.0, 5.0, 1000.0, None])
    passes.queue().wake(KEY)
    await at(1000.0)
    first, second, third, fourth = passes.times
    assert second - first == pytest.approx(RESYNC_SECONDS, rel=0.21)
    assert third - second == pytest.approx(5.0)
    assert fourth - third == pytest.approx(RESYNC_SECONDS, rel=0.21)


@in_virtual_time
async def test_a_resource_that_failed_waits_longer_and_longer_whatever_happens() -> None:
    passes = Passes(ends=[BusyError("503")])
    queue = passes.queue()
    for time in range(600):
        await at(float(time))
        queue.wake(KEY)
    pauses = [after - before for before, after in itertools.pairwise(passes.times)]
    assert pauses[0] <= FIRST_RETRY_SECONDS
    assert LAST_RETRY_SECONDS / 2 <= pauses[-1] <= LAST_RETRY_SECONDS


@in_virtual_time
async def test_an_event_after_a_partial_pass_is_a_pass_within_a_second() -> None:
    passes = Passes(ends=[PartialError("403", 20.0)])
    queue = passes.queue()
    queue.wake(KEY)
    await at(15.0)
    assert len(passes.begun) == 1
    queue.wake(KEY)
    await at(34.0)
    assert passes.times == pytest.approx([0.05, 15.05]), "without an event at the retry"
    await at(36.0)
    assert passes.times[2:] == pytest.approx([35.05])
    number = len(passes.begun)
    for time in range(600):
        await at(40.0 + time / 10)
        queue.wake(KEY)
    pauses = [after - before for before, after in itertools.pairwise(passes.times[number:])]
    assert min(pauses) >= PARTIAL_SECONDS
    assert max(pauses) <= PARTIAL_SECONDS + 0.2


@in_virtual_time
async def test_an_event_during_a_partial_pass_is_another_pass_a_second_after_it() -> None:
    passes = Passes(ends=[PartialError("403", 20.0)], seconds=2.0)
    queue = passes.queue()
    queue.wake(KEY)
    await at(1.0)
    queue.wake(KEY)
    await at(20.0)
    assert passes.times == pytest.approx([0.05, 3.05])


@in_virtual_time
async def test_a_late_retry_does_not_delay_the_regular_pass() -> None:
    passes = Passes(ends=[PartialError("403", 60.0)])
    queue = passes.queue()
    queue.wake(KEY)
    await at(0.06 + 1.2 * RESYNC_SECONDS)
    assert len(passes.begun) == 2
    since = metrics.REGISTRY.get_sample_value("ssd_operator_oldest_success_seconds")
    assert since == pytest.approx(now() - passes.times[1]), "all other calls were made"


@in_virtual_time
async def test_the_api_server_sets_the_time_of_the_retry() -> None:
    passes = Passes(ends=[BusyError("429", 17.0), None])
    passes.queue().wake(KEY)
    await at(60.0)
    assert passes.times == pytest.approx([0.05, 17.05])


@in_virtual_time
async def test_a_resource_that_was_changed_does_not_wait_for_its_retry() -> None:
    passes = Passes(ends=[BusyError("503")])
    queue = passes.queue()
    queue.wake(KEY)
    await at(600.0)
    number = len(passes.begun)
    await at(passes.times[-1] + 1.0)
    queue.wake(KEY, is_changed=True)
    await pass_by(3.0)
    assert len(passes.begun) == number + 2, "and its back-off begins again"


@in_virtual_time
async def test_changes_within_a_second_are_one_pass() -> None:
    passes = Passes()
    queue = passes.queue()
    for number in range(21):
        await at(number / 4)
        queue.wake(KEY, is_changed=True)
        await pass_by(0.1)
        queue.wake(KEY)  # a pod of it changes, too
    await at(60.0)
    assert passes.times == [6.0]


@in_virtual_time
async def test_changes_that_do_not_end_are_not_waited_for() -> None:
    passes = Passes()
    queue = passes.queue()
    for number in range(80):
        await at(number / 4)
        queue.wake(KEY, is_changed=True)
    assert passes.times[0] == pytest.approx(LONGEST_SETTLE_SECONDS, abs=0.1)


@in_virtual_time
async def test_a_change_during_a_pass_is_a_pass_of_its_own() -> None:
    passes = Passes(seconds=1.0)
    queue = passes.queue()
    queue.wake(KEY)
    await at(0.5)
    queue.wake(KEY, is_changed=True)
    await at(60.0)
    assert passes.times == pytest.approx([0.05, 1.5])


@in_virtual_time
async def test_one_pass_a_resource_and_no_more_than_workers_at_a_time() -> None:
    passes = Passes(seconds=1.0)
    queue = passes.queue(num_workers=2)
    for key in (KEY, OTHER, ("here", "c")):
        queue.wake(key)
    await at(0.5)
    assert len(passes.begun) == 2
    assert queue.longest_wait_seconds() == pytest.approx(0.45)
    await at(1.5)
    queue.wake(KEY)
    await at(60.0)
    assert passes.times == pytest.approx([0.05, 0.05, 1.05, passes.times[-1]])
    assert passes.begun[-1][0] == KEY


@pytest.mark.parametrize("end", [asyncio.CancelledError(), ValueError("a mistake")])
@in_virtual_time
async def test_a_pass_that_was_cancelled_or_crashed_comes_again(end: BaseException) -> None:
    passes = Passes(ends=[end, None])
    passes.queue().wake(KEY)
    await at(60.0)
    assert len(passes.begun) == 2


@in_virtual_time
async def test_a_resource_that_always_fails_is_seen_although_it_is_never_late() -> None:
    async def work(key: Key) -> float:
        if key == KEY and now() < 1000.0:
            raise BusyError("503")
        return RESYNC_SECONDS

    queue = WorkQueue(work, 1)
    queue.start()
    queue.wake(KEY)
    queue.wake(OTHER)
    await at(999.0)
    assert (oldest_success(), queue.longest_wait_seconds()) == (999.0, 0.0)
    await at(1100.0)
    assert oldest_success() < 100.0
    await queue.close()


@in_virtual_time
async def test_a_queue_that_does_not_start_is_seen_although_it_knows_no_resource() -> None:
    queue = WorkQueue(Passes().work, 1)
    await at(500.0)
    assert oldest_success() == 500.0
    queue.start()
    assert oldest_success() == 0.0


async def test_each_line_of_a_pass_names_its_resource_and_its_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ssd_operator")
    caplog.handler.setFormatter(JsonFormatter("operator"))
    log = get_logger("ssd_operator.test")

    async def work(key: Key) -> float:
        await asyncio.sleep(0)
        log.info("applied", object="Service/x")
        raise BusyError("no answer")

    queue = WorkQueue(work, num_workers=2)
    queue.start()
    queue.wake(KEY)
    queue.wake(OTHER)
    while caplog.text.count("pass_failed") < 2:  # noqa: ASYNC110  a log line sets no event
        await asyncio.sleep(0)
    await queue.close()
    log.info("stopped")
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    passes = {
        event: [
            (line["namespace"], line["name"], line["pass_id"])
            for line in lines
            if line["event"] == event
        ]
        for event in ("applied", "pass_failed")
    }
    assert {each[:2] for each in passes["applied"]} == {KEY, OTHER}
    assert len({pass_id for *_, pass_id in passes["applied"]}) == 2
    assert set(passes["pass_failed"]) == set(passes["applied"])
    assert not {"namespace", "name", "pass_id"} & lines[-1].keys(), "it is not of a pass"
