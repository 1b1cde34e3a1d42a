"""Each log line of a pass names its resource and its pass."""

import asyncio
import json
import logging
from contextvars import copy_context

import pytest

from ssd.observability.log import JsonFormatter, TextFormatter, bound_fields, get_logger
from ssd_operator.observe.cluster import BusyError, Key
from ssd_operator.runtime.work_queue import WorkQueue

ONE, TWO = ("here", "one"), ("here", "two")


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
    queue.wake(ONE)
    queue.wake(TWO)
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
    assert {each[:2] for each in passes["applied"]} == {ONE, TWO}
    assert len({pass_id for *_, pass_id in passes["applied"]}) == 2
    assert set(passes["pass_failed"]) == set(passes["applied"])
    assert not {"namespace", "name", "pass_id"} & lines[-1].keys(), "it is not of a pass"


def test_lines_of_text_have_the_fields_of_the_pass_too() -> None:
    record = logging.makeLogRecord({"msg": "applied", "fields": {"object": "Service/x"}})
    context = copy_context()
    context.run(bound_fields.set, {"name": "one"})
    line = context.run(TextFormatter("operator").format, record)
    assert line.endswith("applied name=one object=Service/x")
