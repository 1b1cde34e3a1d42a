"""CPUs, hand-overs to a loop that may be gone, and the one life of a step thread."""

import asyncio
import gc
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssd.errors import (
    AddressError,
    HubError,
    MemoryBudgetError,
    ModelNotFoundError,
    SettingsError,
    SetupError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)
from ssd.process import Pulse, StepThread, in_daemon_thread, peer, pin, post, run_process
from ssd.testing.clock import FakeClock
from ssd.types import Peer

HERE = frozenset(os.sched_getaffinity(0))


def test_a_cpu_that_is_not_allowed_is_named() -> None:
    beyond = max(HERE) + 1
    with pytest.raises(SettingsError, match=str(beyond)):
        pin(frozenset({beyond}), frozenset())
    with pytest.raises(SettingsError, match=str(beyond)):
        pin(frozenset(), frozenset({beyond}))
    assert os.sched_getaffinity(0) == HERE


def test_the_step_thread_has_all_cpus_unless_told_otherwise() -> None:
    one = frozenset({min(HERE)})
    try:
        assert pin(frozenset(), one) == HERE
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, HERE)
    assert pin(one, frozenset()) == one


def test_a_closed_loop_is_told_nothing_and_nobody_fails() -> None:
    loop = asyncio.new_event_loop()
    told: list[int] = []
    post(loop, told.append, 1)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    post(loop, told.append, 2)
    assert told == [1]


async def live(load: Callable[[], tuple[str, Callable[[], None]]]) -> tuple[StepThread[str], bool]:
    ends: list[str] = []
    thread = StepThread(load, lambda: ends.append(threading.current_thread().name), HERE)
    thread.start()
    async with asyncio.timeout(10):
        ended_well = await thread.ended
    thread._thread.join(10)
    assert ends == ["step"]
    return thread, ended_well


@pytest.fixture
def thawed() -> None:
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
async def test_what_is_loaded_is_announced_before_it_serves() -> None:
    served: list[int] = []
    may_end = threading.Event()

    def serve() -> None:
        served.append(gc.get_freeze_count())
        assert may_end.wait(10)

    thread = StepThread(lambda: ("model", serve), lambda: None, HERE)
    thread.start()
    async with asyncio.timeout(10):
        assert await thread.loaded == "model"
        may_end.set()
        assert await thread.ended
    gc.unfreeze()
    assert served[0] > 1000, "what was loaded is out of the collector's way"


async def test_a_call_that_never_returns_keeps_nobody() -> None:
    async with asyncio.timeout(10):
        assert await in_daemon_thread(lambda: threading.current_thread().daemon)
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread(lambda: 1 // 0)
        hanging = asyncio.ensure_future(in_daemon_thread(threading.Event().wait))
        await asyncio.sleep(0)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
    assert hanging.cancelled()


async def test_a_set_up_that_fails_is_the_reason() -> None:
    def load() -> tuple[str, Callable[[], None]]:
        raise SetupError("no such model")

    thread, ended_well = await live(load)
    assert not ended_well
    with pytest.raises(SetupError, match="no such model"):
        thread.loaded.result()


async def test_a_crash_ends_the_thread_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    crashes: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", crashes.append)

    def crash() -> None:
        raise ZeroDivisionError

    thread, ended_well = await live(lambda: ("model", crash))
    assert not ended_well
    assert thread.loaded.result() == "model"
    assert crashes[0].exc_type is ZeroDivisionError


def stuck(pulse: Pulse) -> bool:
    return pulse.is_stuck


def test_a_thread_that_does_not_come_back_from_a_step_is_stuck() -> None:
    clock = FakeClock()
    pulse = Pulse(clock)
    clock.advance(1000.0)
    assert not stuck(pulse), "it has not begun: loading takes as long as it takes"
    pulse.beat()
    clock.advance(60.0)
    assert not stuck(pulse)
    clock.advance(0.1)
    assert stuck(pulse)
    pulse.beat()
    assert not stuck(pulse)


def test_a_thread_without_work_is_not_stuck_however_long_it_waits() -> None:
    clock = FakeClock()
    pulse = Pulse(clock)
    pulse.beat()
    with pulse.resting():
        clock.advance(1000.0)
        assert not stuck(pulse)
    assert not stuck(pulse)
    clock.advance(61.0)
    assert stuck(pulse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What the process of these tests can be told."""

    log_format: str = "json"
    """Form of log lines."""
    termination_log: str = ""
    """Last words."""
    pod_name: str = ""
    """Pod."""
    node_name: str = ""
    """Node."""
    cell: str = ""
    """Cell."""


def run(*argv: str, error: SetupError | None = None) -> int:
    async def serve(_settings: Knobs) -> int:
        if error is not None:
            raise error
        return 0

    return run_process("test", Knobs, serve, lambda _settings: None, argv)


@pytest.fixture
def hook_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set back after the test."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)


@pytest.mark.usefixtures("hook_of_threads")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("x"), 78),
        (ModelNotFoundError("x"), 78),
        (UnsupportedModelError("x"), 78),
        (WeightsError("x"), 78),
        (TokenizerError("x"), 78),
        (MemoryBudgetError("x"), 78),
        (AddressError("x"), 1),
        (HubError("x"), 1),
        (SetupError("x"), 1),
    ],
)
def test_the_exit_code_says_whether_a_restart_may_help(error: SetupError, code: int) -> None:
    assert run(error=error) == code


@pytest.mark.usefixtures("hook_of_threads")
def test_the_last_word_is_one_line_also_for_the_kubelet(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.write_text("of an earlier start, which was longer than that of this one")
    code = run("--termination-log", str(log), error=WeightsError("a tensor\n  is missing"))
    assert (code, log.read_text()) == (78, "WeightsError: a tensor is missing")
    assert run("--termination-log", str(log), "--pod-nmae", "x") == 78
    assert log.read_text().startswith("SettingsError: unknown setting --pod-nmae")
    assert run("--termination-log", str(log), error=WeightsError("x" * 10_000)) == 78
    assert len(log.read_bytes()) == 4096
    assert run("--termination-log", str(tmp_path / "no" / "such"), error=HubError("x")) == 1
    assert run() == 0


@pytest.mark.usefixtures("hook_of_threads")
def test_settings_that_are_only_shown_are_checked_and_nothing_is_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checked: list[Knobs] = []
    argv = ("--cell", "3", "--print-config")

    async def serve(_settings: Knobs) -> int:
        raise AssertionError

    assert run_process("test", Knobs, serve, checked.append, argv) == 0
    assert checked == [Knobs(cell="3")]
    assert json.loads(capsys.readouterr().out)["cell"] == "3"

    def refuse(_settings: Knobs) -> None:
        raise ModelNotFoundError("no such folder")

    assert run_process("test", Knobs, serve, refuse, argv) == 78
    assert capsys.readouterr().out == ""


def test_a_peer_is_its_pod_or_at_least_its_process() -> None:
    found = peer(Knobs(pod_name="p", node_name="n", cell="0"), "sha256:1")
    assert found == Peer(pod="p", node="n", cell="0", weights_fingerprint="sha256:1")
    assert peer(Knobs(), "").pod.endswith(f":{os.getpid()}")
