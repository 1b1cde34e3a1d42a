"""Plots of results, as PNG. Needs matplotlib (extra ``bench``)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ssd_bench.peers.measure import Row
from ssd_bench.round_parts import PARTS
from ssd_bench.sampling.rounds import Cell
from ssd_bench.serve.figures import gaps
from ssd_bench.serve.memory import MIB
from ssd_bench.serve.scenarios import ScenarioResult


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


def draw_peers(rows: Sequence[Row], path: Path) -> None:
    """Draw tokens a second of each contender as horizontal bars with quartiles.

    Args:
        rows: rows without a measurement are left out; busy ones are pale.
        path: the file to write.
    """
    found = [(each, each.spread) for each in reversed(rows)]
    bars = [(row, spread) for row, spread in found if spread is not None]
    peers = dict.fromkeys(row.contender.peer for row in rows)
    colors = dict(zip(peers, TABLEAU_COLORS, strict=False))
    figure = Figure(figsize=(8, 1 + 0.28 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.barh(
        [row.name for row, _ in bars],
        [spread.median for _, spread in bars],
        xerr=[
            [spread.median - spread.q1 for _, spread in bars],
            [spread.q3 - spread.median for _, spread in bars],
        ],
        color=[(colors[row.contender.peer], 1.0 if row.is_usable else 0.4) for row, _ in bars],
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("tokens/s of whole requests (quartiles)")
    figure.savefig(path, dpi=120)


def draw_loads(results: Sequence[ScenarioResult], path: Path) -> None:
    """Draw inter-token times and the memory of the processes over the time of each load.

    Args:
        results: scenarios; each load with a series gets a column.
        path: the file to write.
    """
    columns = [(each.name, *series) for each in results for series in each.series]
    figure = Figure(figsize=(6 * max(1, len(columns)), 6), layout="constrained")
    axes = figure.subplots(2, max(1, len(columns)), sharex="col", squeeze=False)
    for column, (name, load, log) in enumerate(columns):
        times, memory = axes[0][column], axes[1][column]
        arrived, seconds, _ = gaps(load.records, load.begun_at, load.ended_at)
        whole = (arrived - load.begun_at).astype(int)
        places = np.unique(whole)
        for percent in (50, 99):
            found = [np.percentile(seconds[whole == each], percent) * 1000 for each in places]
            times.plot(places, found, label=f"p{percent} of a second")
        times.set_title(name)
        times.set_ylabel("inter-token ms")
        times.set_ylim(bottom=0)
        times.legend()
        for process, found in log.num_bytes.items():
            taken = np.array(log.taken_at[: len(found)]) - load.begun_at
            memory.plot(taken, np.array(found) / MIB, label=process)
        memory.set_ylabel("resident memory, MiB")
        memory.set_ylim(bottom=0)
        memory.set_xlabel("seconds")
        if log.num_bytes:
            memory.legend()
    figure.savefig(path, dpi=120)


def _key(record: Mapping[str, Any]) -> str:
    return f"{record['mode']}, batch {record['batch']}, T={record['temperature']:g}"


def draw_sampling(cells: Sequence[Cell], path: Path, proposal_share: float) -> None:
    """Draw hit rate against tokens a round, and the predicted speed-up, of laws of sampling.

    Args:
        cells: of ``ssd bench sampling``; Saguaro sampling is a line over its C.
        path: the file to write.
        proposal_share: see ``Cell.speed_up``.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    hits, speeds = figure.subplots(1, 2)
    temperatures = sorted({each.temperature for each in cells})
    for temperature, color in zip(temperatures, TABLEAU_COLORS, strict=False):
        here = [each for each in cells if each.temperature == temperature]
        coupled = [each for each in here if each.cache_weight is None]
        line = sorted(
            (each for each in here if each.cache_weight is not None),
            key=lambda each: each.cache_weight or 0.0,
        )
        for name, marker, group in (("coupled", "*", coupled), ("Saguaro", "o-", line)):
            if not group:
                continue
            tokens = [each.tokens_per_round for each in group]
            rates = [each.hit_rate("adaptive") for each in group]
            size = 12 if marker == "*" else 5
            hits.plot(
                tokens, rates, marker, color=color, ms=size, label=f"{name}, T = {temperature:g}"
            )
        ups = [each.speed_up("adaptive", proposal_share, waits_after_miss=False) for each in line]
        speeds.plot([each.cache_weight for each in line], ups, "o-", color=color)
        for each in coupled:
            up = each.speed_up("adaptive", proposal_share, waits_after_miss=False)
            speeds.axhline(up, color=color, linestyle="--")
    hits.set_xlabel("tokens a round after a proposal of the draft")
    hits.set_ylabel("hit rate (adaptive fan-out)")
    hits.legend(fontsize=7)
    speeds.set_xlabel("C of Saguaro sampling; 1 is rejection sampling")
    speeds.set_ylabel("predicted speed-up (dashed: coupled)")
    speeds.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
