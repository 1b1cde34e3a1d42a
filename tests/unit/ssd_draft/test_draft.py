"""The draft process around a step thread that fails."""

import asyncio
import os
from pathlib import Path

import pytest

from ssd.engine.config import EngineConfig
from ssd.errors import WeightsError
from ssd.model_files.local_model import LocalModel
from ssd.ports import SystemClock
from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import Peer
from ssd_draft import step_thread
from ssd_draft.draft import Draft
from ssd_draft.settings import DraftSettings
from ssd_draft.setup import DraftSetup


def make_draft() -> Draft:
    setup = DraftSetup(
        settings=DraftSettings(port=0, http_port=0, branches=4),
        model=LocalModel(
            folder=Path("nowhere"),
            tokenizer=ByteTokenizer(),
            engine=EngineConfig(max_model_len=64, branches=4),
        ),
        peer=Peer(),
    )
    return Draft(setup, {0, 1}, SystemClock())


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
