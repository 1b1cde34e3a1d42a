"""Start and exit: settings, exit codes, the termination log, the identity of a process."""

import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ssd import settings
from ssd.engine_settings import EngineSettings
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
from ssd.runtime import process
from ssd.runtime.process import peer, run_process, termination_message
from ssd.settings import to_json
from ssd.types import Peer


def crash() -> None:
    raise ZeroDivisionError("broken on purpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Settings of the process of these tests."""

    log_format: str = "json"
    """Form of log lines."""
    termination_log: str = ""
    """Termination log."""
    cell: str = ""
    """Cell."""


SETTINGS = EngineSettings(model="m", port=0, http_port=0)


def run(*argv: str, error: Exception | None = None) -> int:
    async def serve(_: _Settings) -> int:
        if error is not None:
            raise error
        return 0

    return run_process("test", _Settings, serve, lambda _: None, argv)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore them after the test."""
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
def test_the_exit_code_is_78_if_a_restart_would_fail_in_the_same_way(
    error: SetupError, code: int
) -> None:
    assert run(error=error) == code


@pytest.mark.usefixtures("hooks")
def test_a_setup_error_is_one_line_in_the_termination_log(tmp_path: Path) -> None:
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
    except Exception as error:  # noqa: BLE001 - the test examines it
        return error
    raise AssertionError


def test_the_termination_message_of_a_crash_names_the_innermost_place_in_the_product() -> None:
    # Raised in the standard library, called by a function of the product, called by this test.
    error = raised(lambda: to_json(object()))
    message = termination_message(error)
    assert re.fullmatch(r"TypeError: must be called with .* \(ssd/settings\.py:\d+\)", message)
    number = int(message.rstrip(")").rpartition(":")[2])
    lines = inspect.getsource(settings).splitlines()
    assert "fields(settings)" in lines[number - 1]
    assert termination_message(raised(crash)) == "ZeroDivisionError: broken on purpose", (
        "no frame of the product"
    )


@pytest.mark.parametrize("text", ["é" * 10_000, "a\nb " * 5_000, "\ud800" * 3_000])
def test_a_long_termination_message_is_cut_to_1_kib_and_keeps_the_place(text: str) -> None:
    error = raised(lambda: to_json(object()))
    error.args = (text,)
    message = termination_message(error)
    assert 1000 < len(message.encode()) <= 1024
    assert re.search(r" \(ssd/settings\.py:\d+\)$", message)
    assert message.isprintable()


@pytest.mark.usefixtures("hooks")
def test_an_unhandled_error_is_in_the_termination_log_and_in_the_last_log_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "termination-log"
    with pytest.raises(ZeroDivisionError) as crashed:
        run("--termination-log", str(log), error=ZeroDivisionError("broken\non purpose"))
    sys.excepthook(crashed.type, crashed.value, crashed.tb)
    message = log.read_text()
    assert re.fullmatch(
        r"ZeroDivisionError: broken on purpose \(ssd/runtime/process\.py:\d+\)", message
    )
    failed = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert (failed["event"], failed["error"]) == ("failed", "ZeroDivisionError")
    assert (failed["message"], f"({failed['place']})") == ("broken on purpose", message.split()[-1])
    assert "Traceback" in failed["stack"]


@pytest.mark.usefixtures("hooks")
def test_the_default_termination_log_is_written_only_if_it_exists(
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


def test_print_config_checks_the_settings_and_does_not_serve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checked: list[_Settings] = []
    argv = ("--cell", "3", "--print-config")

    async def serve(_: _Settings) -> int:
        raise AssertionError

    assert run_process("test", _Settings, serve, checked.append, argv) == 0
    assert checked == [_Settings(cell="3")]
    assert json.loads(capsys.readouterr().out)["cell"] == "3"

    def refuse(_: _Settings) -> None:
        raise ModelNotFoundError("no such folder")

    assert run_process("test", _Settings, serve, refuse, argv) == 78
    assert capsys.readouterr().out == ""


def test_a_peer_is_named_by_its_pod_or_by_host_and_process_id() -> None:
    found = peer(replace(SETTINGS, pod_name="p", node_name="n", cell="0"), "sha256:1")
    assert found == Peer(pod="p", node="n", cell="0", weights_fingerprint="sha256:1")
    assert peer(SETTINGS, "").pod.endswith(f":{os.getpid()}")
