"""How a target drains its requests; ``ssd.runtime.life_cycle`` has the rest."""

import asyncio
from pathlib import Path

import pytest

from ssd.engine.config import EngineConfig
from ssd.errors import FieldError, SettingsError
from ssd.model_files.local_model import LocalModel
from ssd.ports import SystemClock
from ssd.rpc.codec import SpeculationChange
from ssd.testing.tokenizer import ByteTokenizer
from ssd.transport import communicator
from ssd.types import Mode, Peer
from ssd_target.models import TargetModels
from ssd_target.serving.streams import TokenStream
from ssd_target.settings import TargetSettings
from ssd_target.target import TargetProcess, collective_channel


@pytest.fixture
async def target(tmp_path: Path) -> TargetProcess:
    """A target whose step thread is never started."""
    settings = TargetSettings(port=0, http_port=0, drain_seconds=3600.0)
    model = LocalModel(
        folder=tmp_path, tokenizer=ByteTokenizer(), engine=EngineConfig(max_model_len=64)
    )
    models = TargetModels(target=model, draft=None)
    return TargetProcess(settings, models, Peer(pod="t"), {0}, SystemClock())


async def test_a_change_of_speculation_keeps_what_is_not_set(target: TargetProcess) -> None:
    target.set_speculation(SpeculationChange(mode=Mode.AUTOREGRESSIVE, draft_deadline_ms=5.0))
    target.set_speculation(SpeculationChange(backup="none"))
    assert target._handler.auto_mode is Mode.AUTOREGRESSIVE
    settings = target._settings
    assert (settings.draft_deadline_ms, settings.backup) == (5.0, "none")
    assert target._pool.settings == settings


def test_a_collective_channel_offers_all_backends_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(communicator, "available_backends", lambda _device: ("nccl", "gloo"))
    assert collective_channel("grpc", "cuda:0") == ((), None)
    backends, set_up_channel = collective_channel("collective", "cuda:0")
    assert backends == ("nccl", "gloo")
    assert set_up_channel is not None


def test_a_process_without_a_backend_is_told_to_use_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "available_backends", lambda _device: ())
    with pytest.raises(SettingsError, match="has no gloo; set channel to grpc"):
        collective_channel("collective", "cpu")


async def test_a_drain_returns_the_number_of_requests_and_waits_for_them(
    target: TargetProcess,
) -> None:
    stream = TokenStream(target._handler._wakeups, 100)
    with target._handler._running((stream,)):
        assert target.drain(0.0) == 1
        finish = asyncio.create_task(target._finish_requests())
        await asyncio.sleep(0)
        assert not finish.done()
    async with asyncio.timeout(60):
        await finish
    assert target.drain() == 0


async def test_the_end_of_a_drain_does_not_wait_for_a_client_that_reads_nothing(
    target: TargetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_target.target._LAST_MESSAGES_SECONDS", 0.0)
    stream = TokenStream(target._handler._wakeups, 100)
    with target._handler._running((stream,)):
        async with asyncio.timeout(60):
            await target._cancel_requests()
    assert target._inbox.is_closed


async def test_a_mode_that_the_target_does_not_have_changes_nothing(target: TargetProcess) -> None:
    change = SpeculationChange(mode=Mode.SYNCHRONOUS, backup="none")
    with pytest.raises(FieldError, match="draft_model"):
        target.set_speculation(change)
    assert target._handler.auto_mode is Mode.AUTO
    assert target._settings.backup == "ngram"
