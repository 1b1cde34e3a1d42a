"""Plots: what is drawn of results, and what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from ssd_bench.__main__ import main
from ssd_bench.round_parts import PARTS


def record(figure: str, mode: str, **more: Any) -> dict[str, Any]:
    return {
        "workload": "demo",
        "batch": 1,
        "temperature": 0.0,
        "mode": mode,
        "figure": figure,
        "median": 0.9,
        "q1": 0.8,
        "q3": 1.0,
        "is_usable": True,
        "settings": {"branches": "24"},
    } | more


def results(branches: int) -> dict[str, Any]:
    settings = {"branches": str(branches)}
    parts = {"workload": "demo", "batch": 1, "temperature": 0.0, "mode": "ssd"}
    return {
        "records": [
            record("speed_up", "ssd/ar", settings=settings),
            record("speed_up", "ssd/sd", settings=settings),
            record("efficiency", "ar", settings=settings),
            record("efficiency", "ssd", batch=8, is_usable=False, settings=settings),
            record("hit_rate", "ssd", settings=settings),
        ],
        "rounds": [parts | {"parts_ms": dict.fromkeys(PARTS, 0.5)}],
    }


ALL = {"speed_up.png", "efficiency.png", "hit_rate.png", "rounds.png"}


def written(folder: Path) -> set[str]:
    for each in folder.iterdir():
        assert each.read_bytes().startswith(b"\x89PNG")
    return {each.name for each in folder.iterdir()}


def test_runs_of_several_numbers_of_branches_are_drawn_together(tmp_path: Path) -> None:
    files = []
    for branches in (8, 24):
        files.append(str(tmp_path / f"{branches}.json"))
        Path(files[-1]).write_text(json.dumps(results(branches)))
    assert main(["plots", *files, "--output", str(tmp_path / "plots")]) == 0
    assert written(tmp_path / "plots") == ALL


def test_a_figure_of_one_point_has_no_plot(tmp_path: Path) -> None:
    found = results(24)
    (tmp_path / "results.json").write_text(json.dumps(found))
    assert main(["plots", str(tmp_path / "results.json"), "--output", str(tmp_path / "p")]) == 0
    assert written(tmp_path / "p") == ALL - {"hit_rate.png"}


@pytest.mark.parametrize("text", ["", "[]", "{}", None])
def test_a_file_without_results_is_one_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    if text is not None:
        file.write_text(text)
    assert main(["plots", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}: not results.json of 'ssd bench'")
    assert error.count("\n") == 1
