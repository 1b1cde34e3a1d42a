"""Plots of results, as PNG. Needs matplotlib (extra ``bench``)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


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
