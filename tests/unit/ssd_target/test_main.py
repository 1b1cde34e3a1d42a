"""The arguments with which the process constructs its target."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from ssd.errors import SettingsError
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_target import __main__ as process
from ssd_target.settings import TargetSettings

ALLOWED = {0, 1, 2}


class NoTarget:
    """Keeps the CPUs of its step thread and ends at once."""

    cpus: Collection[int]

    def __init__(self, _settings: object, _model: object, _me: object, *rest: Any) -> None:
        NoTarget.cpus = rest[0]

    def drain(self) -> None: ...

    async def run(self) -> int:
        return 0


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _thread: ALLOWED)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _thread, cpus: calls.append(set(cpus)))
    monkeypatch.setattr(process, "TargetProcess", NoTarget)
    return calls


@pytest.mark.parametrize(("cpus", "step_cpus"), [("", ALLOWED), ("2", {2})])
async def test_cpus_of_other_threads_do_not_bind_the_step_thread(
    cpus: str, step_cpus: set[int], pins: list[set[int]], tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    assert await process.serve(TargetSettings(model=str(folder), cpus=cpus, io_cpus="1")) == 0
    assert NoTarget.cpus == step_cpus
    assert pins == [{1}]


@pytest.mark.parametrize("flag", ["cpus", "io_cpus"])
async def test_a_cpu_that_is_not_allowed_is_refused_before_loading(
    flag: str, pins: list[set[int]]
) -> None:
    with pytest.raises(SettingsError, match=r"CPUs \[7\]"):
        await process.serve(TargetSettings(model="nowhere", **{flag: "7"}))  # type: ignore[arg-type]
    assert pins == []
