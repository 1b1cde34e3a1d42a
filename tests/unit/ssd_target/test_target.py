"""How a target leaves."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from ssd.engine.config import EngineConfig
from ssd.engine.runner import ModelRunner
from ssd.telemetry import SystemClock
from ssd.testing.clock import FakeClock
from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import Peer
from ssd_target import target as module
from ssd_target.settings import TargetSettings
from ssd_target.step_thread import StepSettings
from ssd_target.target import Target


@pytest.fixture
async def target(tmp_path: Path) -> Target:
    """One whose step thread was never started, so that nothing ends by itself."""
    settings = TargetSettings(port=0, http_port=0, drain_seconds=3600.0)
    step = StepSettings(
        folder=tmp_path,
        engine=EngineConfig(max_model_len=64),
        max_queue=1,
        num_threads=1,
        cpus=frozenset({0}),
    )
    return Target(settings, step, ByteTokenizer(), SystemClock(), Peer(pod="t"))


async def test_a_step_thread_that_outlives_the_drain_can_still_say_how_it_ended(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LAST_WORDS_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match=r"the step thread did not end within 0 s"):
        await target._drain()
    target._step.ended.set_result(None)


async def test_a_crash_during_the_drain_is_raised(target: Target) -> None:
    target._step.ended.set_exception(ZeroDivisionError("broken on purpose"))
    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        await target._drain()


async def test_a_drain_lasts_as_long_as_was_asked_for_and_the_first_word_counts(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LAST_WORDS_SECONDS", 0.0)
    target._handler._enter()
    assert target.drain(0.0) == 1
    assert target.drain(3600.0) == 1
    async with asyncio.timeout(20.0):
        with pytest.raises(TimeoutError):
            await target._drain()


async def test_a_drain_after_a_signal_changes_nothing(target: Target) -> None:
    target.leave()
    target.drain(0.0)
    assert target._drain_seconds == 3600.0


async def test_a_target_is_ready_from_loaded_to_leaving_and_says_why_not(target: Target) -> None:
    assert target._is_ready() == (False, "loading")
    target._handler.runner = cast(ModelRunner, object())
    assert target._is_ready() == (True, "ready")
    target.leave()
    assert target._is_ready() == (False, "draining")
    target._step.ended.set_result(None)
    assert target._is_ready() == (False, "the step thread has ended")


async def test_a_target_that_hangs_in_a_round_is_not_live(target: Target) -> None:
    clock = FakeClock()
    target._watchdog._clock = clock
    assert target._is_live()
    target._watchdog.beat()
    clock.advance(61.0)
    assert not target._is_live()
    target._watchdog.beat()
    assert target._is_live()
    target._step.ended.set_result(None)
    assert not target._is_live()
