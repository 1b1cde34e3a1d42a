"""Runs of ``ssd bench`` that were ended."""

from pathlib import Path

import pytest
from tests.unit.ssd_bench.test_metrics import cell_of_five_modes

from ssd.errors import SettingsError
from ssd_bench.runs import Cell
from ssd_bench.unfinished import Unfinished

SETTINGS = {"lookahead": "6"}


def cells_on(*other_cpus: float) -> list[Cell]:
    """Return one cell for each load of the machine."""
    cells = []
    for batch, busy in enumerate(other_cpus, start=1):
        cell = cell_of_five_modes()
        cell.batch, cell.other_cpus = batch, [busy]
        cells.append(cell)
    return cells


def test_a_run_goes_on_with_the_cells_that_were_measured(tmp_path: Path) -> None:
    cells = cells_on(0.0, 0.0)
    Unfinished(tmp_path / "new", SETTINGS).save(cells)
    assert Unfinished(tmp_path / "new", SETTINGS).cells() == cells


def test_cells_of_a_busy_machine_are_measured_again(tmp_path: Path) -> None:
    Unfinished(tmp_path, SETTINGS).save(cells_on(2.0, 0.0))
    assert [cell.batch for cell in Unfinished(tmp_path, SETTINGS).cells()] == [2]


def test_a_finished_run_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    run = Unfinished(tmp_path, SETTINGS)
    assert run.cells() == []
    run.save(cells_on(0.0))
    run.remove()
    run.remove()
    assert run.cells() == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    Unfinished(tmp_path, SETTINGS).save(cells_on(0.0))
    with pytest.raises(SettingsError, match=r"other settings.*choose another --output"):
        Unfinished(tmp_path, {"lookahead": "5"}).cells()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cells": [1]}', '{"cells": [{}]}'])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "unfinished.json").write_text(content)
    with pytest.raises(SettingsError, match=r"unfinished.json: delete it"):
        Unfinished(tmp_path, SETTINGS).cells()
