"""Child processes: their events, failures and end."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from tests.processes import ROOT

from ssd.errors import AddressError, NotReadyError, SettingsError, SetupError
from ssd.observability.log import Event
from ssd.runtime import launch
from ssd.runtime.launch import (
    LOCAL_DEADLINE_MS,
    ChildProcess,
    Deployment,
    EventListener,
    LinkWatch,
    deployed,
    setup_error,
)
from ssd.settings import HUGE_PAGES, load
from ssd_draft.settings import DraftSettings
from ssd_target.settings import TargetSettings

FAKE_CHILD = "tests.fake_child"
PRINTING_CHILD = """
import os, sys
sys.exit("the variable is " + os.environ["GLIBC_TUNABLES"])
"""
PARENT = """
import asyncio
from ssd.runtime.launch import ChildProcess

async def run():
    child = ChildProcess("draft 0", "tests.fake_child", (), lambda _name, _event: None)
    await child.start()
    await child.ready()
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""
CRASHING_CHILD = """
import sys
from ssd.fetch import FetchSettings
from ssd.runtime.process import run_process

async def serve(_settings):
    raise RuntimeError("no\\nsuch instruction")

sys.exit(run_process("fetch", FetchSettings, serve, lambda _settings: None, sys.argv[1:]))
"""
"""Crashes like a process of the product."""
REFUSED_GATEWAY = """
import json, signal, sys
for event in ({"event": "target_not_ready", "reason": "the token is not accepted"},
              {"event": "listening", "http": "a:1"}):
    print(json.dumps(event), file=sys.stderr, flush=True)
signal.pause()
"""


def link(state: str, address: str = "a:1") -> Event:
    return Event("link", {"draft": address, "state": state, "reason": "tokenizer_fingerprint: x"})


def ignore_event(_name: str, _event: Event) -> None: ...


async def settings_of_started(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> tuple[TargetSettings, DraftSettings]:
    """Return what target and draft of a deployment read from flags and environment."""
    started: dict[str, Sequence[str]] = {}

    def fake(name: str, module: str, flags: Sequence[str], on_event: EventListener) -> ChildProcess:
        started[module] = flags
        return ChildProcess(name, FAKE_CHILD, flags, on_event)

    monkeypatch.setattr(launch, "ChildProcess", fake)
    async with deployed(deployment):
        pass
    return (
        load(TargetSettings, started["ssd_target"], prefix="SSD_TARGET").settings,
        load(DraftSettings, started["ssd_draft"], prefix="SSD_DRAFT").settings,
    )


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a child finds its module, as in the product and the tests."""
    folder = tmp_path / "modules"
    folder.mkdir()
    path = os.pathsep.join(map(str, (folder, ROOT / "services", ROOT)))
    monkeypatch.setenv("PYTHONPATH", path)
    return folder


@pytest.mark.parametrize(
    ("printed", "kind"), [("SettingsError", SettingsError), ("AddressError", AddressError)]
)
def test_the_error_of_a_child_keeps_its_type(printed: str, kind: type[SetupError]) -> None:
    error = setup_error("draft 0", Event("failed", {"error": printed, "message": "port 1 in use"}))
    assert type(error) is kind
    assert str(error) == "draft 0: port 1 in use"


@pytest.mark.parametrize("kind", ["FieldError", "Exception", "annotations"])
def test_a_childs_crash_is_named_with_its_place(kind: str) -> None:
    fields = {"error": kind, "message": "bf16 path", "place": "ssd/engine/models/decoder.py:31"}
    error = setup_error("draft 0", Event("failed", fields))
    assert type(error) is SetupError
    assert str(error) == f"draft 0: {kind}: bf16 path (ssd/engine/models/decoder.py:31)"


def test_a_failure_without_a_message_is_an_error() -> None:
    assert str(setup_error("draft 0", Event("failed", {}))) == "draft 0: error: failed"


async def test_a_child_that_crashes_names_the_cause_in_one_line_and_keeps_its_stack(
    modules: Path,
) -> None:
    (modules / "crashing_child.py").write_text(CRASHING_CHILD)
    flags = ("--model", "hf://a/b@0123456789abcdef0123456789abcdef01234567")
    child = ChildProcess("draft 0", "crashing_child", flags, ignore_event)
    await child.start()
    with pytest.raises(SetupError) as caught:
        await child.ready()
    assert await child.stop() == 1
    words = str(caught.value)
    assert re.fullmatch(
        r"draft 0: RuntimeError: no such instruction \(ssd/runtime/process\.py:\d+\)", words
    )
    stack = "\n".join(caught.value.__notes__)
    assert 'crashing_child.py", line 7, in serve' in stack


@pytest.mark.parametrize(
    ("of_user", "expected"), [(None, HUGE_PAGES[1]), ("glibc.malloc.check=3",) * 2]
)
async def test_a_child_requests_huge_pages_unless_the_user_has_set_the_variable(
    modules: Path, monkeypatch: pytest.MonkeyPatch, of_user: str | None, expected: str
) -> None:
    (modules / "printing_child.py").write_text(PRINTING_CHILD)
    monkeypatch.delenv(HUGE_PAGES[0], raising=False)
    if of_user is not None:
        monkeypatch.setenv(HUGE_PAGES[0], of_user)
    child = ChildProcess("draft 0", "printing_child", (), ignore_event)
    await child.start()
    with pytest.raises(SetupError, match=f"the variable is {expected}"):
        await child.ready()
    assert await child.stop() == 1


async def test_a_child_that_is_killed_by_a_signal_names_it_and_keeps_its_stack() -> None:
    child = ChildProcess("draft 0", FAKE_CHILD, (), ignore_event)
    await child.start()
    await child.ready()
    os.kill(child.pid, signal.SIGSEGV)
    assert await child.stop() == -signal.SIGSEGV
    words = "draft 0 was killed by signal 11 (SIGSEGV): a line of some library"
    assert str(child.failure()) == words
    assert 'fake_child.py", line' in "\n".join(child.failure().__notes__)


def test_a_child_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(60)


async def test_the_error_of_a_child_without_events_contains_its_last_lines() -> None:
    child = ChildProcess("draft 0", "ssd_no_such_module", (), ignore_event)
    await child.start()
    with pytest.raises(SetupError, match=r"draft 0 ended with exit code 1: .*ssd_no_such_module"):
        await child.ready()
    assert await child.stop() == 1


async def test_a_child_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    child = ChildProcess("draft 0", FAKE_CHILD, (), ignore_event)
    await child.start()
    await child.ready()
    assert await child.stop() == 0


async def test_stopping_a_child_that_never_started_is_no_error() -> None:
    child = ChildProcess("draft 0", "ssd_draft", (), ignore_event)
    async with asyncio.timeout(60):
        assert await child.stop() == 0


async def test_events_of_a_child_arrive_in_order_and_contain_its_addresses() -> None:
    received: list[tuple[str, str]] = []
    child = ChildProcess(
        "draft 3", FAKE_CHILD, ("--port", "1"), lambda name, it: received.append((name, it.name))
    )
    await child.start()
    await child.listening()
    assert (child.grpc_address, child.http_address) == ("a:1", "a:2")
    await child.ready()
    assert await child.stop() == 0
    assert await child.stop() == 0
    assert received == [("draft 3", word) for word in ("listening", "ready", "stopped")]


async def test_a_child_that_is_not_ready_in_time_is_a_setup_error(modules: Path) -> None:
    (modules / "fake_child.py").write_text("import signal; signal.pause()")
    child = ChildProcess("target", "fake_child", (), ignore_event)
    await child.start()
    with pytest.raises(SetupError, match=r"target was not ready within 0.01 s"):
        await child.ready(0.01)
    child.kill()
    assert await child.stop() == -9
    assert "(SIGKILL), perhaps because memory ran out" in str(child.failure())


async def test_the_start_waits_for_the_links_of_all_drafts() -> None:
    received: list[str] = []
    watch = LinkWatch(2, lambda _name, event: received.append(event.name))
    for event in (link("active", "a:1"), link("lost", "a:1"), link("active", "a:2")):
        watch("target", event)
    watch("draft 0", link("active", "a:9"))  # a draft's own view does not count
    waiting = asyncio.create_task(watch.linked(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    watch("target", link("active", "a:1"))
    await waiting
    assert received == ["link"] * 5


async def test_a_pair_that_does_not_match_is_refused_with_the_field() -> None:
    watch = LinkWatch(1, ignore_event)
    watch("target", link("refused"))
    with pytest.raises(SettingsError, match=r"do not match in tokenizer fingerprint: x"):
        await watch.linked(5)


@pytest.mark.parametrize("num_drafts", [0, 1])
async def test_missing_drafts_are_no_error(num_drafts: int) -> None:
    await LinkWatch(num_drafts, ignore_event).linked(0.001)


async def test_a_target_that_ends_while_a_client_uses_it_is_reported_with_its_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fake(name: str, _module: str, *others: Any) -> ChildProcess:
        return ChildProcess(name, FAKE_CHILD, *others)

    async def call_a_killed_target() -> None:
        async with deployed(Deployment(num_drafts=0)) as running:
            os.kill(running.target.pid, signal.SIGSEGV)
            raise NotReadyError("the connection was lost")

    monkeypatch.setattr(launch, "ChildProcess", fake)
    with pytest.raises(SetupError, match=r"target was killed by signal 11 \(SIGSEGV\)"):
        await call_a_killed_target()


@pytest.mark.parametrize(
    ("environ", "flags", "shape"),
    [
        ({}, (), (6, 24)),
        ({"SSD_TARGET_LOOKAHEAD": "4", "SSD_TARGET_BRANCHES": "8"}, (), (4, 8)),
        ({"SSD_DRAFT_LOOKAHEAD": "4", "SSD_DRAFT_BRANCHES": "8"}, (), (6, 24)),
        ({"SSD_TARGET_LOOKAHEAD": "4"}, ("--lookahead", "5"), (5, 24)),
    ],
)
async def test_drafts_have_the_lookahead_and_the_branches_of_their_target(
    environ: dict[str, str],
    flags: tuple[str, ...],
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    target, draft = await settings_of_started(Deployment(common_flags=flags), monkeypatch)
    assert (target.lookahead, target.branches) == shape
    assert (draft.lookahead, draft.branches) == shape


@pytest.mark.parametrize(
    ("of_deployment", "of_user", "expected"),
    [("", None, ""), ("", "/mine", ""), ("/folder", None, "/folder/0")],
)
async def test_a_draft_has_a_state_folder_of_its_own(
    of_deployment: str, of_user: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_user is not None:
        monkeypatch.setenv("SSD_DRAFT_STATE_FOLDER", of_user)
    _, draft = await settings_of_started(Deployment(state_folder=of_deployment), monkeypatch)
    assert draft.state_folder == expected


@pytest.mark.parametrize("channel", ["grpc", "collective"])
@pytest.mark.parametrize("is_flag", [False, True])
async def test_drafts_have_the_channel_of_their_target(
    channel: str, monkeypatch: pytest.MonkeyPatch, *, is_flag: bool
) -> None:
    if not is_flag:
        monkeypatch.setenv("SSD_TARGET_CHANNEL", channel)
    flags = ("--channel", channel) if is_flag else ()
    target, draft = await settings_of_started(Deployment(target_flags=flags), monkeypatch)
    assert (target.channel, draft.channel) == (channel, channel)


@pytest.mark.parametrize(("of_user", "expected"), [(None, LOCAL_DEADLINE_MS), ("20", 20.0)])
async def test_a_local_target_has_a_long_table_deadline_unless_the_environment_sets_it(
    of_user: str | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_user is not None:
        monkeypatch.setenv("SSD_TARGET_DRAFT_DEADLINE_MS", of_user)
    target, _ = await settings_of_started(Deployment(), monkeypatch)
    assert target.draft_deadline_ms == expected


async def test_a_temporary_target_that_would_refuse_its_caller_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSD_TARGET_TLS_CERTIFICATE", "tls.crt")
    monkeypatch.setenv("SSD_TARGET_TOKEN_FILE", "clients")
    names = "SSD_TARGET_TLS_CERTIFICATE and SSD_TARGET_TOKEN_FILE"
    with pytest.raises(SettingsError, match=names):
        async with deployed(Deployment()):
            pass


async def test_a_target_that_ends_before_its_gateway_is_ready_ends_the_start() -> None:
    class Gateway:
        async def listening(self) -> None:
            await asyncio.Event().wait()

    class Target:
        async def wait(self) -> int:
            return -signal.SIGKILL

        def failure(self) -> SetupError:
            return SetupError("target was killed by signal 9 (SIGKILL)")

    gateway: Any = Gateway()
    target: Any = Target()
    with pytest.raises(SetupError, match="target was killed"):
        await launch._ready_beside(gateway, target)


async def test_a_gateway_that_its_target_refuses_ends_the_start_with_the_reason(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Target:
        async def wait(self) -> None:
            await asyncio.Event().wait()

    (modules / "refused_gateway.py").write_text(REFUSED_GATEWAY)
    monkeypatch.setattr(launch, "GATEWAY_SECONDS", 0.01)
    gateway, target = ChildProcess("gateway", "refused_gateway", (), ignore_event), Target()
    await gateway.start()
    words = r"gateway was not ready within 0.01 s: the token is not accepted"
    with pytest.raises(SetupError, match=words):
        await launch._ready_beside(gateway, cast("ChildProcess", target))
    gateway.kill()
    assert await gateway.stop() == -signal.SIGKILL
