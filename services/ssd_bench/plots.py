"""Plots of benchmarks, as PNG and PDF. Needs matplotlib (extra ``bench``)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ssd_bench.loads import LATENCIES, PERCENTILES, LoadResult
from ssd_bench.metrics import PARTS
from ssd_bench.peers.measure import Row
from ssd_bench.peers.report import plain_of
from ssd_bench.prompts import DEMO
from ssd_bench.sampling.rounds import Cell

Record = Mapping[str, Any]
"""An element of ``report.records`` or ``report.round_records``."""
NAMES = {"ar": "AR", "sd": "SD", "ssd": "SSD", "ar-all": "AR, all CPUs", "sd-all": "SD, all CPUs"}
DPI = 120
_SIZE = (6.0, 3.6)
_OF_CELLS = ("batch", "temperature", "data", "output")
"""Settings that each record has by itself, and one that changes no measurement."""


def draw_results(runs: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw runs of ``ssd bench``: speed-up by mode, efficiency, hit rate, parts of a round.

    Labels have each setting that differs between the runs.

    Args:
        runs: contents of results.json. The hit rate is over N if they have several, else over T.
            The parts of a round are those of the first run.
        folder: gets the files.

    Returns:
        The names of the files; a plot without a record is left out.
    """
    records = [
        {**record, "differs": own}
        for run, own in zip(runs, differences(runs), strict=True)
        for record in run["records"]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    several = len({_branches(record) for record in records}) > 1

    def chosen(figure: str) -> list[Record]:
        return [record for record in records if record["figure"] == figure]

    speed_ups = [record for record in chosen("speed_up") if record["mode"].endswith("/ar")]
    drawn = {
        "speed_up": _draw_bars(speed_ups),
        "efficiency": _draw_lines(
            chosen("efficiency"),
            ("batch", lambda record: float(record["batch"])),
            lambda record: f"{NAMES[record['mode']]}, {_case(record, 'batch')}",
            "efficiency: verify / round (quartiles)",
        ),
        "hit_rate": _draw_lines(
            chosen("hit_rate"),
            ("branches of a table (N)", lambda record: float(_branches(record)))
            if several
            else ("temperature", lambda record: float(record["temperature"])),
            lambda record: _case(record, "branches" if several else "T"),
            "hit rate (quartiles)",
        ),
    }
    names = [name for name, figure in drawn.items() if figure is not None]
    for name, figure in drawn.items():
        if figure is not None:
            save(figure, folder / f"{name}.png")
    rounds: dict[str, list[Record]] = {}
    for run, own in zip(runs, differences(runs), strict=True):
        # Runs without a difference have different cells.
        rounds.setdefault(", ".join(own.values()), []).extend(run["rounds"])
    if any(rounds.values()):
        draw_rounds(rounds, folder / "rounds.png")
        names.append("rounds")
    return [f"{name}.{ending}" for name in names for ending in ("png", "pdf")]


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, and beside it a PDF that contains its fonts as TrueType."""
    figure.savefig(path, dpi=DPI)
    # Publishers refuse Type 3, the default.
    with rc_context({"pdf.fonttype": 42}):
        figure.savefig(path.with_suffix(".pdf"))


def differences(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the settings of each run in which the runs differ, as texts for labels, by name.

    Runs with the same cells and without such a setting have their numbers.
    """
    settings = [dict(run["records"][0]["settings"]) if run["records"] else {} for run in runs]
    names = [
        name
        for name in dict.fromkeys(name for own in settings for name in own)
        if name not in _OF_CELLS and len({own.get(name) for own in settings}) > 1
    ]
    found = [{name: _setting(name, own.get(name, "–")) for name in names} for own in settings]
    cells = [
        {(_case(record), *own.values()) for record in run["records"]}
        for run, own in zip(runs, found, strict=True)
    ]
    if len(set().union(*cells)) < sum(map(len, cells)):
        return [own | {"run": f"run {number}"} for number, own in enumerate(found, 1)]
    return found


def _setting(name: str, value: str) -> str:
    return f"N={value}" if name == "branches" else f"{name}={value}"


def _branches(record: Record) -> int:
    return int(record["settings"]["branches"])


def _case(record: Record, without: str = "") -> str:
    """Return data set, batch size, temperature and settings that differ, but for one of them."""
    parts = {
        "batch": f"batch {record['batch']}",
        "T": f"T={record['temperature']:g}",
        "data": record.get("workload", DEMO),
        **record.get("differs", {}),
    }
    return ", ".join(text for name, text in parts.items() if text and name != without)


def _draw_bars(records: Sequence[Record]) -> Figure | None:
    """Draw speed-ups over AR as groups of bars, a group for each case and a bar for each mode."""
    if not records:
        return None
    cases = list(dict.fromkeys(map(_case, records)))
    modes = list(dict.fromkeys(record["mode"].split("/")[0] for record in records))
    figure = Figure(figsize=(max(_SIZE[0], 1.4 * len(cases)), _SIZE[1]), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(modes)
    for shift, mode in enumerate(modes):
        own = [record for record in records if record["mode"].split("/")[0] == mode]
        offset = (shift - (len(modes) - 1) / 2) * width
        places = [cases.index(_case(record)) + offset for record in own]
        medians = [record["median"] for record in own]
        bars = axes.bar(places, medians, width * 0.9, yerr=_errors(own), label=NAMES[mode])
        for bar, record in zip(bars, own, strict=True):
            bar.set_alpha(1.0 if record["is_usable"] else 0.4)
        texts = [f"{median:.2f}" for median in medians]
        axes.bar_label(bars, texts, label_type="center", fontsize=8)
    axes.axhline(1.0, color="gray", linewidth=1)
    labels = [label.replace(", ", "\n") for label in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=8)
    axes.set_ylabel("tokens/s / AR (quartiles)")
    axes.legend(fontsize=8)
    return figure


def _draw_lines(
    records: Iterable[Record],
    horizontal: tuple[str, Callable[[Record], float]],
    label: Callable[[Record], str],
    title: str,
) -> Figure | None:
    """Draw a figure as lines with quartiles, one for each label; None if all are single points."""
    lines: dict[str, list[Record]] = {}
    for record in records:
        lines.setdefault(label(record), []).append(record)
    axis_label, position = horizontal
    ticks = sorted({position(record) for own in lines.values() for record in own})
    if len(ticks) < 2:
        return None
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes: Axes = figure.subplots()
    for text, own in lines.items():
        own.sort(key=position)
        axes.errorbar(
            list(map(position, own)),
            [record["median"] for record in own],
            yerr=_errors(own),
            marker="o",
            capsize=3,
            label=text,
        )
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel(axis_label)
    axes.set_ylabel(title)
    figure.legend(fontsize=8, loc="outside right upper")
    return figure


def _errors(records: Sequence[Record]) -> list[list[float]]:
    return [
        [record["median"] - record["q1"] for record in records],
        [record["q3"] - record["median"] for record in records],
    ]


def draw_rounds(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw the parts of a round as stacked bars, those of each run, by its name, side by side."""

    def key(record: Record) -> str:
        return f"{NAMES[record['mode']]}, {_case(record)}"

    keys = list(dict.fromkeys(key(record) for records in runs.values() for record in records))
    figure = Figure(figsize=(max(6.0, 0.9 * len(keys) * len(runs)), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(runs)
    colors = dict(zip(PARTS, TABLEAU_COLORS, strict=False))
    ticks: dict[float, str] = {}
    for shift, (name, records) in enumerate(runs.items()):
        for record in records:
            place = keys.index(key(record)) + (shift - (len(runs) - 1) / 2) * width
            bottom = 0.0
            for part in PARTS:
                axes.bar(place, record["parts_ms"][part], width * 0.9, bottom, color=colors[part])
                bottom += record["parts_ms"][part]
            axes.annotate(f"{bottom:.3g}", (place, bottom), ha="center", va="bottom", fontsize=8)
            label = key(record).replace(", ", "\n")
            ticks[place] = f"{name}\n{label}" if len(runs) > 1 else label
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_ylabel("milliseconds of a round")
    parts = PARTS[::-1]
    handles = [Patch(color=colors[part]) for part in parts]
    figure.legend(handles, parts, loc="outside right upper")
    save(figure, path)


def draw_latency(results: Sequence[LoadResult], path: Path) -> None:
    """Draw percentiles of TTFT and of the time between tokens against the rate of requests.

    Loads without a rate, or without latencies, are left out.
    """
    loads = sorted((load for load in results if load.latency_ms), key=lambda load: load.rate)
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    rates = [load.rate for load in loads]
    for axes, name in zip(figure.subplots(1, 2), LATENCIES, strict=True):
        for percentile in PERCENTILES:
            values = [load.latency_ms[name][percentile] for load in loads]
            axes.plot(rates, values, "o-", label=percentile)
        axes.set_xlabel("requests/s (Poisson)")
        axes.set_ylabel(f"{name}, ms")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    save(figure, path)


def draw_peers(rows: Sequence[Row], path: Path) -> None:
    """Draw tokens a second of each contender as horizontal bars with quartiles.

    A bar shows how many times as fast as plain decoding of the same engine on the same CPUs it is.
    Rows without a measurement are left out; busy ones are pale.
    """
    spreads = [(row, row.spread) for row in reversed(rows)]
    bars = [(row, spread) for row, spread in spreads if spread is not None]
    peers = dict.fromkeys(row.contender.peer for row in rows)
    colors = dict(zip(peers, cycle(TABLEAU_COLORS), strict=False))
    figure = Figure(figsize=(8, 0.8 + 0.3 * len(bars)), layout="constrained")
    axes = figure.subplots()
    has_cases = len({row.case for row in rows}) > 1
    drawn = axes.barh(
        [row.name if has_cases else row.contender.name for row, _ in bars],
        [spread.median for _, spread in bars],
        xerr=[
            [spread.median - spread.q1 for _, spread in bars],
            [spread.q3 - spread.median for _, spread in bars],
        ],
        color=[(colors[row.contender.peer], 1.0 if row.is_usable else 0.4) for row, _ in bars],
    )
    texts = []
    for row, spread in bars:
        plain = plain_of(row, rows)
        base = plain.spread if plain is not None and plain is not row else None
        texts.append("" if base is None else f"×{spread.median / base.median:.2f}")
    axes.bar_label(drawn, texts, label_type="center", fontsize=8, color="white")
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("tokens/s (quartiles); ×: over plain")
    save(figure, path)


def draw_sampling(cells: Sequence[Cell], path: Path, proposal_share: float) -> None:
    """Draw hit rate against tokens per round, and the predicted speed-up, of laws of sampling.

    Each law has its ``Cell.own_policy``. Saguaro sampling is a line over its C. For
    ``proposal_share``, see ``Cell.speed_up``.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    hits, speeds = figure.subplots(1, 2)
    temperatures = sorted({cell.temperature for cell in cells})
    for temperature, color in zip(temperatures, TABLEAU_COLORS, strict=False):
        at_temperature = [cell for cell in cells if cell.temperature == temperature]
        coupled = [cell for cell in at_temperature if cell.cache_weight is None]
        line = sorted(
            (cell for cell in at_temperature if cell.cache_weight is not None),
            key=lambda cell: cell.cache_weight or 0.0,
        )
        for name, marker, group in (("coupled", "*", coupled), ("Saguaro", "o-", line)):
            if not group:
                continue
            rates = [cell.hit_rate(cell.own_policy) for cell in group]
            ends = [cell.hit_interval(cell.own_policy) for cell in group]
            hits.errorbar(
                [cell.tokens_per_round for cell in group],
                rates,
                yerr=[
                    [rate - low for rate, (low, _) in zip(rates, ends, strict=True)],
                    [high - rate for rate, (_, high) in zip(rates, ends, strict=True)],
                ],
                fmt=marker,
                color=color,
                ms=12 if marker == "*" else 5,
                elinewidth=1,
                capsize=3,
                label=f"{name}, T = {temperature:g}",
            )
        ups = [cell.speed_up(proposal_share, waits_after_miss=False) for cell in line]
        speeds.plot([cell.cache_weight for cell in line], ups, "o-", color=color)
        for cell in coupled:
            up = cell.speed_up(proposal_share, waits_after_miss=False)
            speeds.axhline(up, color=color, linestyle="--")
    hits.set_xlabel("tokens per round after a proposal of the draft")
    hits.set_ylabel("hit rate (95 % interval)")
    hits.legend(fontsize=7)
    speeds.set_xlabel("C of Saguaro sampling; 1 is rejection sampling")
    speeds.set_ylabel("predicted speed-up (dashed: coupled)")
    speeds.set_ylim(bottom=0)
    save(figure, path)
