"""CPUs, hand-overs to a loop that may be gone, and the one life of a step thread."""

import asyncio
import gc
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssd import process, settings
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
from ssd.process import (
    StepThread,
    Watchdog,
    in_daemon_thread,
    last_word,
    peer,
    pin,
    post,
    run_process,
)
from ssd.settings import to_json
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


async def live(load: Callable[[], tuple[str, Callable[[], None]]]) -> StepThread[str]:
    """Return the thread after its end."""
    ends: list[str] = []
    thread = StepThread(load, lambda: ends.append(threading.current_thread().name), HERE)
    thread.start()
    await asyncio.wait({thread.ended}, timeout=10)
    thread._thread.join(10)
    assert ends == ["step"]
    return thread


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
        await thread.ended
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

    thread = await live(load)
    assert thread.ended.exception() is None
    with pytest.raises(SetupError, match="no such model"):
        thread.loaded.result()


def crash() -> None:
    raise ZeroDivisionError("broken on purpose")


async def test_a_crash_while_it_serves_is_why_the_thread_ended() -> None:
    thread = await live(lambda: ("model", crash))
    assert thread.loaded.result() == "model"
    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        thread.ended.result()


async def test_a_crash_while_it_loads_is_why_nothing_is_loaded() -> None:
    def load() -> tuple[str, Callable[[], None]]:
        crash()
        return "model", crash

    thread = await live(load)
    assert thread.ended.exception() is None
    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        thread.loaded.result()


def stuck(watchdog: Watchdog) -> bool:
    return watchdog.is_stuck


def test_a_thread_that_does_not_come_back_from_a_step_is_stuck() -> None:
    clock = FakeClock()
    watchdog = Watchdog(clock)
    clock.advance(1000.0)
    assert not stuck(watchdog), "it has not begun: loading takes as long as it takes"
    watchdog.beat()
    clock.advance(60.0)
    assert not stuck(watchdog)
    clock.advance(0.1)
    assert stuck(watchdog)
    watchdog.beat()
    assert not stuck(watchdog)


def test_a_thread_without_work_is_not_stuck_however_long_it_waits() -> None:
    clock = FakeClock()
    watchdog = Watchdog(clock)
    watchdog.beat()
    with watchdog.resting():
        clock.advance(1000.0)
        assert not stuck(watchdog)
    assert not stuck(watchdog)
    clock.advance(61.0)
    assert stuck(watchdog)


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


def run(*argv: str, error: Exception | None = None) -> int:
    async def serve(_settings: Knobs) -> int:
        if error is not None:
            raise error
        return 0

    return run_process("test", Knobs, serve, lambda _settings: None, argv)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set back after the test."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.mark.usefixtures("hooks")
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


@pytest.mark.usefixtures("hooks")
def test_the_last_word_is_one_line_also_for_the_kubelet(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.write_text("of an earlier start, which was longer than that of this one")
    code = run("--termination-log", str(log), error=WeightsError("a tensor\n  is missing"))
    assert (code, log.read_text()) == (78, "WeightsError: a tensor is missing")
    assert run("--termination-log", str(log), "--pod-nmae", "x") == 78
    assert log.read_text().startswith("SettingsError: unknown setting --pod-nmae")
    assert run("--termination-log", str(log), error=WeightsError("x" * 10_000)) == 78
    assert len(log.read_bytes()) == 1024
    assert run("--termination-log", str(tmp_path / "no" / "such"), error=HubError("x")) == 1
    assert run() == 0


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        return error
    raise AssertionError


def test_the_last_word_on_a_crash_names_the_innermost_place_of_our_code() -> None:
    # The standard library raises it, called by a function of ours, called from here.
    error = raised(lambda: to_json(object()))
    word = last_word(error)
    assert re.fullmatch(r"TypeError: must be called with .* \(ssd/settings\.py:\d+\)", word)
    number = int(word.rstrip(")").rpartition(":")[2])
    lines = inspect.getsource(settings).splitlines()
    assert "fields(settings)" in lines[number - 1]
    assert last_word(raised(crash)) == "ZeroDivisionError: broken on purpose", "not our code"


@pytest.mark.parametrize("text", ["é" * 10_000, "a\nb " * 5_000, "\ud800" * 3_000])
def test_the_last_word_is_at_most_a_kibibyte_and_keeps_its_place(text: str) -> None:
    error = raised(lambda: to_json(object()))
    error.args = (text,)
    word = last_word(error)
    assert 1000 < len(word.encode()) <= 1024
    assert re.search(r" \(ssd/settings\.py:\d+\)$", word)
    assert word.isprintable()


@pytest.mark.usefixtures("hooks")
def test_what_nobody_expected_is_the_last_word_and_the_last_line_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "termination-log"
    with pytest.raises(ZeroDivisionError) as crashed:
        run("--termination-log", str(log), error=ZeroDivisionError("broken\non purpose"))
    sys.excepthook(crashed.type, crashed.value, crashed.tb)
    word = log.read_text()
    assert re.fullmatch(r"ZeroDivisionError: broken on purpose \(ssd/process\.py:\d+\)", word)
    failed = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert (failed["event"], failed["error"]) == ("failed", "ZeroDivisionError")
    assert (failed["message"], f"({failed['place']})") == ("broken on purpose", word.split()[-1])
    assert "Traceback" in failed["stack"]


@pytest.mark.usefixtures("hooks")
def test_the_kubelets_file_is_written_where_it_is_and_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setattr(process, "TERMINATION_LOG", str(log))
    for argv in (("--termination-log", str(log)), ("--no-such-setting", "1")):
        assert run(*argv, error=SetupError("x")) in (1, 78)
        assert not log.exists()
        assert "not_written" not in capsys.readouterr().err
    log.touch()
    assert run("--no-such-setting", "1") == 78
    assert log.read_text().startswith("SettingsError: unknown setting")


@pytest.mark.usefixtures("hooks")
def test_progress_of_a_large_model_stays_below_the_limit_of_repeated_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[tuple[str, float]] = []
    monkeypatch.setattr(process, "log_progress", lambda *progress: logged.append(progress))
    report = process.progress_log()
    for stage in ("load", "warm-up"):
        for tensor in range(723):
            report(stage, (tensor + 1) / 723)
    assert len(logged) < 100
    assert [fraction for _, fraction in logged].count(1.0) == 2


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
