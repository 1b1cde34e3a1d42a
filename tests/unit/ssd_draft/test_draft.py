"""A process whose step thread fails must end, and say why."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ssd.engine.config import EngineConfig
from ssd.errors import WeightsError
from ssd.telemetry import SystemClock
from ssd.testing.clock import FakeClock
from ssd_draft import draft as module
from ssd_draft import step_thread
from ssd_draft.draft import Draft
from ssd_draft.links import LinkTerms
from ssd_draft.settings import DraftSettings
from ssd_draft.step_thread import StepSettings
from ssd_draft.worker import Worker


def make_draft() -> Draft:
    step = StepSettings(
        folder=Path("nowhere"),
        engine=EngineConfig(max_model_len=64, branches=4),
        num_reserved_positions=14,
        num_threads=1,
        cpus=frozenset({0, 1}),
    )
    terms = LinkTerms(
        vocab_size=8, tokenizer_fingerprint="", lookahead=6, branches=4, capacity=1, max_len=64
    )
    return Draft(DraftSettings(port=0, http_port=0), step, terms, SystemClock())


async def test_a_crash_of_the_step_thread_ends_the_process_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(*_args: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(step_thread, "load_runner", crash)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _thread, _cpus: None)
    with pytest.raises(RuntimeError, match="out of order"):
        await make_draft().run()


async def test_a_step_thread_that_outlives_the_drain_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LAST_WORDS_SECONDS", 0.0)
    worker = cast(Worker, SimpleNamespace(num_sessions=0, start_draining=lambda: None))
    with pytest.raises(TimeoutError, match=r"the step thread did not end within 0 s"):
        await make_draft()._drain(worker)


async def test_weights_that_do_not_fit_are_the_setup_error_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_args: object) -> None:
        raise WeightsError("no tensor")

    monkeypatch.setattr(step_thread, "load_runner", refuse)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _thread, _cpus: None)
    with pytest.raises(WeightsError):
        await make_draft().run()


async def test_a_draft_is_ready_from_loaded_to_leaving_and_says_why_not() -> None:
    draft = make_draft()
    assert draft._is_ready() == (False, "loading")
    draft._worker = cast(Worker, object())
    assert draft._is_ready() == (True, "ready")
    draft.leave()
    assert draft._is_ready() == (False, "draining")
    draft._step.ended.set_result(None)
    assert draft._is_ready() == (False, "the step thread has ended")


async def test_a_draft_that_hangs_in_a_step_is_not_live() -> None:
    draft, clock = make_draft(), FakeClock()
    draft._watchdog._clock = clock
    assert draft._is_live()
    draft._watchdog.beat()
    clock.advance(61.0)
    assert not draft._is_live()
    with draft._watchdog.resting():
        assert draft._is_live()
    draft._step.ended.set_result(None)
    assert not draft._is_live()


def test_counting_sessions_after_the_loop_has_closed_is_no_error() -> None:
    async def make() -> Draft:
        return make_draft()

    loop = asyncio.new_event_loop()
    draft = loop.run_until_complete(make())
    loop.close()
    draft._on_count(0)
    draft._on_count(1)
