"""Each log line of a pass names its resource and its pass."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import pytest

from ssd.telemetry import JsonFormatter, TextFormatter, bound_fields, get_logger
from ssd_operator.observe.cluster import BusyError, Key
from ssd_operator.runtime.work_queue import WorkQueue

ONE, TWO = ("here", "one"), ("here", "two")


@dataclass
class Lines(logging.Handler):
    """What was logged; waits for so many lines of an event."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter("operator"))

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))
        self.changed.set()

    async def wait(self, event: str, number: int) -> list[dict[str, Any]]:
        while len(found := [line for line in self.lines if line["event"] == event]) < number:
            self.changed.clear()
            await self.changed.wait()
        return found


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("ssd_operator")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


async def test_each_line_of_a_pass_names_its_resource_and_its_pass(lines: Lines) -> None:
    log = get_logger("ssd_operator.test")

    async def work(key: Key) -> float:
        await asyncio.sleep(0)
        log.info("applied", object="Service/x")
        raise BusyError("no answer")

    queue = WorkQueue(work, num_workers=2, now=asyncio.get_running_loop().time)
    running = asyncio.ensure_future(queue.run())
    queue.wake(ONE)
    queue.wake(TWO)
    applied = await lines.wait("applied", 2)
    failed = await lines.wait("pass_failed", 2)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert {(line["namespace"], line["name"]) for line in applied} == {ONE, TWO}
    assert len({line["pass_id"] for line in applied}) == 2
    names = ("namespace", "name", "pass_id")
    assert {tuple(line[name] for name in names) for line in failed} == {
        tuple(line[name] for name in names) for line in applied
    }


async def test_a_line_outside_of_a_pass_has_no_such_fields(lines: Lines) -> None:
    get_logger("ssd_operator.test").info("started", namespaces="all")
    (line,) = await lines.wait("started", 1)
    assert not {"namespace", "name", "pass_id"} & line.keys()


def test_text_has_the_fields_of_the_task_too() -> None:

    record = logging.makeLogRecord({"msg": "applied", "fields": {"object": "Service/x"}})

    def shown() -> str:
        bound_fields.set({"name": "one"})
        return TextFormatter("operator").format(record)

    assert copy_context().run(shown).endswith("applied name=one object=Service/x")
