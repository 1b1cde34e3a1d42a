"""Plots: what is drawn of results, and what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from ssd_bench import plots
from ssd_bench.__main__ import main, write
from ssd_bench.metrics import PARTS


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


def results(branches: int, **more: str) -> dict[str, Any]:
    settings = {"branches": str(branches), **more}
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


ALL = {"speed_up", "efficiency", "hit_rate", "rounds"}


def written(folder: Path) -> set[str]:
    """Return the names of plots, each of which is a PNG and a PDF."""
    names = {each.stem for each in folder.iterdir()}
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        pdf = (folder / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF")
        assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf
        assert b"/Type3" not in pdf
    assert len(list(folder.iterdir())) == 2 * len(names)
    return names


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
    assert written(tmp_path / "p") == ALL - {"hit_rate"}


def test_results_have_no_plots_of_an_earlier_run_beside_them(tmp_path: Path) -> None:
    for name in ALL:
        (tmp_path / f"{name}.png").touch()
        (tmp_path / f"{name}.pdf").touch()
    names = write({"records": [], "rounds": []}, "", tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names)


def labels(monkeypatch: pytest.MonkeyPatch, *runs: dict[str, Any]) -> dict[str, list[str]]:
    """Draw runs; return the cases of the speed-ups and the lines of the other plots."""
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **_: figures.update({path.name: figure})
    )
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    plots.draw_results(runs, Path("nowhere"))
    bars = figures["speed_up.png"].axes[0]
    found = {"speed_up": [text.get_text().replace("\n", ", ") for text in bars.get_xticklabels()]}
    for name in ("efficiency", "hit_rate"):
        if f"{name}.png" in figures:
            (legend,) = figures[f"{name}.png"].legends
            found[name] = [text.get_text() for text in legend.get_texts()]
    return found


def test_labels_have_the_settings_in_which_runs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = results(24, lookahead="4", engine="torch"), results(24, lookahead="6")
    other["records"][-1]["temperature"] = 1.0
    found = labels(monkeypatch, one, other)
    case = "batch 1, T=0, demo"
    expected = [f"{case}, lookahead=4, engine=torch", f"{case}, lookahead=6, engine=–"]
    assert found["speed_up"] == expected
    assert "SSD, T=0, demo, lookahead=6, engine=–" in found["efficiency"]
    assert found["hit_rate"] == [
        "batch 1, demo, lookahead=4, engine=torch",
        "batch 1, demo, lookahead=6, engine=–",
    ]


def test_the_number_of_branches_is_a_label_where_it_is_not_an_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = labels(monkeypatch, results(8), results(24))
    assert found["speed_up"] == ["batch 1, T=0, demo, N=8", "batch 1, T=0, demo, N=24"]
    assert "SSD, T=0, demo, N=8" in found["efficiency"]
    assert found["hit_rate"] == ["batch 1, T=0, demo"]


def test_runs_with_the_same_settings_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = labels(monkeypatch, results(24, output="a"), results(24, output="b"))
    assert found["speed_up"] == ["batch 1, T=0, demo, run 1", "batch 1, T=0, demo, run 2"]


def test_runs_of_different_batch_sizes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = results(24, batch="1"), results(24, batch="8")
    one["records"] = [*one["records"][:2], record("efficiency", "ssd")]
    other["records"] = other["records"][3:4]
    assert labels(monkeypatch, one, other)["efficiency"] == ["SSD, T=0, demo"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not results.json of 'ssd bench' (no JSON)"),
        ("[" * 100_000, "not results.json of 'ssd bench' (no JSON)"),
        ('{"records": [], "rounds": []}', "not results.json of 'ssd bench' (they have nothing to"),
        ("[]", "not results.json of 'ssd bench' (it has no records)"),
        ('{"records": []}', "not results.json of 'ssd bench' (they cannot be drawn: 'rounds'"),
        ('{"records": [7], "rounds": []}', "not results.json of 'ssd bench' (they cannot be drawn"),
        (None, "No such file or directory; name a results.json"),
    ],
)
def test_a_file_without_results_is_one_line_without_python(
    text: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    if text is not None:
        file.write_text(text)
    assert main(["plots", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}: {problem}")
    assert error.count("\n") == 1
    assert "Error(" not in error
