"""Plots of results, as PNG. Needs matplotlib (extra ``bench``)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ssd_bench.round_parts import PARTS


def draw_slow_draft(series: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw speed-up and late rate against T_table / T_verify.

    Args:
        series: the records of ``slow_draft.as_records``, by the name of the line.
        path: the file to write.
    """
    figure = Figure(figsize=(7, 6), layout="constrained")
    speed, late = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    for name, points in series.items():
        ratios = [each["ratio"] for each in points]
        spreads = [each["speed_up"] for each in points]
        (line,) = speed.plot(ratios, [each["median"] for each in spreads], "o-", label=name)
        speed.fill_between(
            ratios,
            [each["q1"] for each in spreads],
            [each["q3"] for each in spreads],
            color=line.get_color(),
            alpha=0.2,
        )
        late.plot(ratios, [each["late_rate"] for each in points], "o-", label=name)
    speed.axhline(1.0, color="gray", linewidth=1)
    speed.set_xscale("log", base=2)
    speed.set_ylim(bottom=0)
    speed.set_ylabel("tokens/s of SSD / AR (quartiles)")
    speed.legend()
    late.set_ylim(-0.05, 1.05)
    late.set_ylabel("late rate")
    late.set_xlabel("T_table / T_verify")
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16]
    late.set_xticks(ticks, [f"{each:g}" for each in ticks])
    figure.savefig(path, dpi=120)


def draw_rounds(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw the parts of a round as stacked bars: one bar for each run, side by side.

    Args:
        runs: the records of ``report.round_records``, by the name of the run.
        path: the file to write.
    """
    keys = list(dict.fromkeys(_key(each) for records in runs.values() for each in records))
    figure = Figure(figsize=(max(6.0, 1.2 * len(keys) * len(runs)), 6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(runs)
    colors = dict(zip(PARTS, TABLEAU_COLORS, strict=False))
    ticks: dict[float, str] = {}
    for shift, (name, records) in enumerate(runs.items()):
        for each in records:
            place = keys.index(_key(each)) + (shift - (len(runs) - 1) / 2) * width
            bottom = 0.0
            for part in PARTS:
                axes.bar(place, each["parts_ms"][part], width * 0.9, bottom, color=colors[part])
                bottom += each["parts_ms"][part]
            axes.annotate(f"{bottom:.3g}", (place, bottom), ha="center", va="bottom", fontsize=7)
            label = _key(each).replace(", ", "\n")
            ticks[place] = f"{name}\n{label}" if len(runs) > 1 else label
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7)
    axes.set_ylabel("milliseconds of a round")
    parts = PARTS[::-1]
    handles = [Patch(color=colors[part]) for part in parts]
    figure.legend(handles, parts, loc="outside right upper")
    figure.savefig(path, dpi=120)


def _key(record: Mapping[str, Any]) -> str:
    return f"{record['mode']}, batch {record['batch']}, T={record['temperature']:g}"
