"""``ssd up`` with processes that fail: they log as a draft and a target do, and load no model."""

import asyncio
import json
import os
import signal
from typing import Any

import pytest
from tests.processes import ROOT

from ssd.errors import SetupError
from ssd.runtime import launch
from ssd.runtime.launch import ChildProcess, Deployment
from ssd_cli import up as up_module
from ssd_cli.up import up


async def test_a_failed_draft_restarts_at_its_address_and_a_failed_target_ends_all_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children: list[ChildProcess] = []
    shown = ""

    def fake(name: str, _module: str, *others: Any) -> ChildProcess:
        children.append(ChildProcess(name, "tests.fake_child", *others))
        return children[-1]

    async def until(text: str) -> None:
        nonlocal shown
        while text not in shown:
            await asyncio.sleep(0.01)
            shown += "".join(capsys.readouterr())

    path = os.pathsep.join(map(str, (ROOT / "services", ROOT)))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(launch, "ChildProcess", fake)
    monkeypatch.setattr(up_module, "RESTART_SECONDS", 0.1)
    running = asyncio.create_task(up(Deployment(num_drafts=2), is_json=True))
    async with asyncio.timeout(60):
        await until("\n")
        addresses = json.loads(shown)
        *_, draft, target = children
        assert addresses["drafts"][1]["grpc"] == draft.grpc_address
        assert addresses["target"]["grpc"] == target.grpc_address
        os.kill(draft.pid, signal.SIGKILL)
        await until("draft 1: ready again\n")
        assert "restarting it in 0.1 s" in shown
        assert children[-1].grpc_address == draft.grpc_address
        os.kill(target.pid, signal.SIGKILL)
        with pytest.raises(SetupError, match="target was killed by signal 9"):
            await running
        assert [await each.stop() for each in children] == [0, -9, -9, 0]
