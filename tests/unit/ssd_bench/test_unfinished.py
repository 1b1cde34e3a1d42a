"""Runs of ``ssd bench`` that were ended."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.ssd_bench.test_metrics import cell_of_five_modes

import ssd
from ssd import demo
from ssd.errors import SettingsError
from ssd.runtime.launch import Deployment
from ssd_bench import __main__ as command
from ssd_bench import runs, unfinished
from ssd_bench.runs import BenchmarkRun, Cell, Results, run
from ssd_bench.unfinished import Unfinished, identity

PLAN = BenchmarkRun(
    deployment=Deployment(),
    target_folder=demo.folder("target"),
    prompts={"demo": [(1, 2)]},
    batches=(1, 2, 3),
    temperatures=(0.0,),
    max_tokens=16,
    repetitions=2,
)
NUM_OF_A_CELL = 7
"""Batches of a cell of ``PLAN``: three modes twice, and the warm-up."""


def results_of(**other_cpus: float) -> Results:
    """Return cells by batch size (``b1``), each with the load of its machine."""
    cells = []
    for name, busy in other_cpus.items():
        cell = cell_of_five_modes()
        cell.batch, cell.other_cpus = int(name[1:]), [busy]
        cells.append(cell)
    return Results(cells=cells, target_peak_bytes=70, draft_peak_bytes=7, table_seconds=0.5)


class Machine:
    """In place of the processes: cells take no time, and memory has a peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[int] = []
        self.interrupted_batch = 0
        monkeypatch.setattr(runs, "deployed", self._deployed)
        monkeypatch.setattr(runs, "TargetClient", self._client)
        monkeypatch.setattr(runs, "DraftClient", self._client)
        monkeypatch.setattr(runs, "_measure", self._measure)
        monkeypatch.setattr(runs, "peak_memory_bytes", lambda pid: pid)

    @contextlib.asynccontextmanager
    async def _deployed(self, _deployment: Deployment) -> AsyncIterator[Any]:
        target = SimpleNamespace(grpc_address="", http_address="", pid=50)
        yield SimpleNamespace(target=target, drafts=[SimpleNamespace(grpc_address="", pid=9)])

    @contextlib.asynccontextmanager
    async def _client(self, _address: str, **_settings: object) -> AsyncIterator[Any]:
        async def model_info() -> Any:
            return SimpleNamespace(dtype="float32", dtype_reason="", active_drafts=1)

        async def get_status() -> Any:
            return SimpleNamespace(table_seconds=0.25)

        yield SimpleNamespace(model_info=model_info, get_status=get_status)

    async def _measure(
        self, _contenders: object, _plan: object, cell: Cell, on_batch: Callable[[], None]
    ) -> None:
        if cell.batch == self.interrupted_batch:
            raise KeyboardInterrupt
        self.measured.append(cell.batch)
        cell.other_cpus = [0.0]
        for _ in range(NUM_OF_A_CELL):
            on_batch()


async def test_only_cells_that_are_missing_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, batches, saved = Machine(monkeypatch), [], []
    found = await run(
        PLAN,
        lambda: batches.append(1),
        known=results_of(b3=0.0, b1=0.0),
        on_cell=lambda results: saved.append([cell.batch for cell in results.cells]),
    )
    assert machine.measured == [2]
    assert saved == [[1, 2, 3]]
    assert [cell.batch for cell in found.cells] == [1, 2, 3]
    assert len(batches) == PLAN.num_batches
    assert (found.target_peak_bytes, found.draft_peak_bytes) == (70, 9)


async def test_a_run_whose_cells_are_all_measured_starts_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(runs, "deployed", None)
    known = results_of(b1=0.0, b2=0.0, b3=0.0)
    assert await run(PLAN, lambda: None, known=known) == known
    assert machine.measured == []


async def test_a_second_interruption_loses_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, file = Machine(monkeypatch), Unfinished(tmp_path, "name")
    file.save(results_of(b1=0.0, b2=9.0, b3=0.0))
    machine.interrupted_batch = 2
    with pytest.raises(KeyboardInterrupt):
        await run(PLAN, lambda: None, known=file.results(), on_cell=file.save)
    assert [cell.batch for cell in file.results().cells] == [1, 3]
    machine.interrupted_batch = 0
    await run(PLAN, lambda: None, known=file.results(), on_cell=file.save)
    assert [cell.batch for cell in file.results().cells] == [1, 2, 3]
    assert machine.measured == [2]


def test_a_file_has_all_results_but_the_cells_of_a_busy_machine(tmp_path: Path) -> None:
    found = results_of(b1=2.0, b2=0.0)
    Unfinished(tmp_path / "new", "name").save(found)
    assert Unfinished(tmp_path / "new", "name").results() == replace(found, cells=found.cells[1:])
    assert Unfinished(tmp_path / "new", "other").results() == Results()


def test_a_finished_run_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    run = Unfinished(tmp_path, "name")
    run.save(results_of(b1=0.0))
    run.remove()
    run.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cells": [1]}', '{"cells": [{}]}'])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "unfinished-name.json").write_text(content)
    with pytest.raises(SettingsError, match=r"unfinished-name.json: delete it"):
        Unfinished(tmp_path, "name").results()


def test_what_changes_a_measurement_changes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, code = tmp_path / "model", tmp_path / "code"
    for folder in (model, code):
        folder.mkdir()
    (model / "weights").write_text("1")
    (code / "engine.py").write_text("1")
    monkeypatch.setattr(unfinished, "SOURCES", code)

    def name(lookahead: str = "6", text: str = "x = 1") -> str:
        return identity({"lookahead": lookahead}, {"demo": [text]}, [model])

    names = [name()]
    assert name() == names[0]
    names += [name(lookahead="5"), name(text="x = 2")]
    os.utime(model / "weights", (1, 1))
    names.append(name())
    os.utime(code / "engine.py", (1, 1))
    names.append(name())
    monkeypatch.setattr(unfinished, "machine", lambda: "another one")
    names.append(name())
    monkeypatch.setenv("SSD_TARGET_WEIGHTS", "int8")
    names.append(name())
    monkeypatch.setattr(unfinished, "_version", lambda _: "another one")
    names.append(name())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {99})
    names.append(name())
    assert len(set(names)) == len(names)


class Runs:
    """In place of the measurements of ``ssd bench``: each cell takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: list[list[int]] = []
        self.plan = PLAN
        self.is_interrupted = True
        monkeypatch.setattr(command, "run_plan", self._run_plan)
        monkeypatch.setattr(command, "read_bandwidth", lambda _cpus: 1e9)
        monkeypatch.setattr(command, "write", lambda *_: ["results.json"])
        monkeypatch.setattr(command, "markdown", lambda *_: "")

    def _run_plan(
        self, plan: BenchmarkRun, *, known: Results, on_cell: Callable[[Results], None]
    ) -> Results:
        self.known.append([cell.batch for cell in known.cells])
        self.plan = plan
        if self.is_interrupted:
            on_cell(results_of(b8=0.0))
            raise KeyboardInterrupt
        return results_of(b1=0.0, b8=0.0)


def test_the_command_goes_on_with_what_an_interrupted_one_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs_of_bench = Runs(monkeypatch)
    argv = ["--temperature", "0", "--num-prompts", "1", "--json", "--output"]
    assert command.main(["--batch", "1,8", *argv, str(tmp_path)]) == 130
    capsys.readouterr()
    assert command.main(["--batch", "1", *argv, str(tmp_path)]) == 130
    assert "has an ended run of other settings" in capsys.readouterr().err
    runs_of_bench.is_interrupted = False
    assert command.main(["--batch", "8,1,1", *argv, str(tmp_path)]) == 0
    assert "measured cells: 1" in capsys.readouterr().err
    assert runs_of_bench.known == [[], [], [8]]
    assert runs_of_bench.plan.batches == (1, 8)
    (other,) = tmp_path.glob("unfinished-*.json")
    assert command.main(["--batch", "1,8", *argv, str(tmp_path)]) == 0
    assert runs_of_bench.known[-1] == []
    assert other.exists()


def test_no_mode_finds_the_prompts_that_another_one_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_of_bench = Runs(monkeypatch)
    runs_of_bench.is_interrupted = False
    argv = ["--temperature", "0", "--num-prompts", "1", "--json", "--output", str(tmp_path)]
    assert command.main(argv) == 0
    deployment = runs_of_bench.plan.deployment
    for target in (deployment, runs.on_all_cpus(deployment)):
        assert "--no-prefix-cache" in target.target_flags


def test_the_name_covers_the_code_of_this_product() -> None:
    assert Path(ssd.__file__).is_relative_to(unfinished.SOURCES)
    assert Path(runs.__file__).is_relative_to(unfinished.SOURCES)
