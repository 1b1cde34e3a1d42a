"""Which ticks of the machine are those of other processes."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from ssd_bench import machine
from ssd_bench.machine import OtherWork, own_processes

ME = os.getpid()
CPUS = os.cpu_count() or 1


def stat(pid: int, parent: int, session: int, *ticks: int) -> str:
    times = " ".join(map(str, [*ticks, 0, 0, 0, 0][:4]))
    return f"{pid} (a) name) S {parent} {pid} {session} {'0 ' * 7}{times} 20 0 1"


def write(proc: Path, used: int, idle: int, processes: Mapping[int, str]) -> None:
    for file in proc.glob("[0-9]*/stat"):
        file.unlink()
    proc.joinpath("stat").write_text(f"cpu {used} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1\n")
    for pid, text in processes.items():
        proc.joinpath(f"{pid}").mkdir(exist_ok=True)
        proc.joinpath(f"{pid}", "stat").write_text(text)
    proc.joinpath("self").mkdir(exist_ok=True)
    proc.joinpath("self", "stat").write_text(processes[ME])


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "PROC", tmp_path)
    return tmp_path


def test_processes_of_a_child_are_own_ones_also_without_their_parent(proc: Path) -> None:
    child, grandchild, orphan, foreign, sibling = range(ME + 1, ME + 6)
    processes = {
        ME: stat(ME, 1, 7),
        child: stat(child, ME, child),
        grandchild: stat(grandchild, child, grandchild),
        orphan: stat(orphan, 1, child),
        foreign: stat(foreign, 1, foreign),
        sibling: stat(sibling, 1, 7),
    }
    write(proc, 0, 0, processes)
    assert own_processes().keys() == {child, grandchild, orphan}


def test_ticks_of_this_run_are_no_other_work_also_those_of_a_child_that_ended(proc: Path) -> None:
    child, ended, foreign = range(ME + 1, ME + 4)
    own = {ME: stat(ME, 1, 7, 500), child: stat(child, ME, child, 1000)}
    write(proc, 0, 0, own | {ended: stat(ended, child, child, 300)})
    others = OtherWork()
    own = {ME: stat(ME, 1, 7, 510), child: stat(child, ME, child, 1040, 9, 340, 10)}
    write(proc, 400, 600, own | {foreign: stat(foreign, 1, foreign, 290)})
    # 400 ticks: 10 of this process, 49 of the child, 50 of the one that ended, one in doubt.
    assert others.cpus() == pytest.approx(290 / 1000 * CPUS)


def test_rounding_is_no_other_work(proc: Path) -> None:
    own = {ME: stat(ME, 1, 7)} | {pid: stat(pid, ME, 7) for pid in range(ME + 1, ME + 5)}
    write(proc, 0, 0, own)
    others = OtherWork()
    write(proc, 4, 6, own)
    assert others.cpus() == 0.0
