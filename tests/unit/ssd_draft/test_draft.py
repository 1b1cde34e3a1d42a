"""The draft process around a step thread that fails."""

import asyncio
import os

import pytest
from tests.draft_setup import make_setup

from ssd.errors import WeightsError
from ssd.ports import SystemClock
from ssd_draft import step_thread
from ssd_draft.draft import Draft


def make_draft() -> Draft:
    return Draft(make_setup(), {0, 1}, SystemClock())


@pytest.mark.parametrize("error", [RuntimeError("out of order"), WeightsError("no tensor")])
async def test_an_error_of_the_step_thread_ends_the_process_with_this_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_args: object) -> None:
        raise error

    monkeypatch.setattr(step_thread, "load_runner", fail)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _thread, _cpus: None)
    with pytest.raises(type(error), match=str(error)):
        await make_draft().run()


def test_counting_sessions_after_the_loop_has_closed_is_no_error() -> None:
    async def make() -> Draft:
        return make_draft()

    loop = asyncio.new_event_loop()
    draft = loop.run_until_complete(make())
    loop.close()
    draft._on_count(0)
    draft._on_count(1)
