"""What the process hands to the target that it constructs."""

import os
from pathlib import Path

import pytest

from ssd.errors import SettingsError
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_target import __main__ as process
from ssd_target.settings import TargetSettings
from ssd_target.step_thread import StepSettings

ALLOWED = {0, 1, 2}


class NoTarget:
    """Records the settings of its step thread and ends at once."""

    step: StepSettings

    def __init__(self, _settings: TargetSettings, step: StepSettings, *_others: object) -> None:
        NoTarget.step = step

    def drain(self) -> None: ...

    async def run(self) -> int:
        return 0


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _thread: ALLOWED)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _thread, cpus: calls.append(set(cpus)))
    monkeypatch.setattr(process, "Target", NoTarget)
    return calls


@pytest.mark.parametrize(("cpus", "step_cpus"), [("", ALLOWED), ("2", {2})])
async def test_the_cpus_of_the_others_do_not_bind_the_step_thread(
    cpus: str, step_cpus: set[int], pins: list[set[int]], tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    assert await process.serve(TargetSettings(model=str(folder), cpus=cpus, io_cpus="1")) == 0
    assert NoTarget.step.cpus == step_cpus
    assert pins == [{1}]


@pytest.mark.parametrize("flag", ["cpus", "io_cpus"])
async def test_a_cpu_that_is_not_ours_is_refused_before_anything_is_loaded(
    flag: str, pins: list[set[int]]
) -> None:
    with pytest.raises(SettingsError, match=r"CPUs \[7\]"):
        await process.serve(TargetSettings(model="nowhere", **{flag: "7"}))  # type: ignore[arg-type]
    assert pins == []
