"""Results as tables and as JSON records."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ssd_bench.metrics import PARTS, Spread, spread, spreads
from ssd_bench.prompts import DEMO
from ssd_bench.runs import MODES, ON_ALL_CPUS, Cell, Results

COLUMNS = {
    "tokens_per_second": "tokens/s",
    "tokens_per_second_each": "each",
    "tokens_per_second_per_cpu": "per CPU",
    "hit_rate": "hit rate",
    "late_rate": "late",
    "backup_rate": "n-grams",
    "tokens_per_round": "tokens per round",
    "verify_ms": "verify ms",
    "round_ms": "round ms",
    "efficiency": "efficiency",
    "time_to_first_token_ms": "TTFT ms",
}


_TERMINAL_COLUMNS = {
    name: title
    for name, title in COLUMNS.items()
    if name not in ("tokens_per_second_each", "late_rate", "backup_rate")
    and not name.endswith("_ms")
}
"""Columns that fit a terminal with 80 columns. The files contain all of them."""


def speed_up(cell: Cell, mode: str = "ssd", base: str = "ar") -> Spread:
    """Return tokens/s of a mode / those of another, of each pair of interleaved repetitions."""
    pairs = zip(cell.figures[mode], cell.figures[base], strict=True)
    return spread([own.tokens_per_second / other.tokens_per_second for own, other in pairs])


def speed_ups(cell: Cell) -> dict[tuple[str, str], Spread]:
    """Return the ratio of each mode to AR, and of SSD to each other mode."""
    pairs = [(mode, "ar") for mode in cell.figures]
    pairs += [("ssd", base) for base in cell.figures if base != "ar"]
    return {
        (mode, base): speed_up(cell, mode, base)
        for mode, base in pairs
        if mode != base and mode in cell.figures and base in cell.figures
    }


def bound_over_sd(cell: Cell) -> float:
    """Return tokens/s of SSD / SD if SSD hid everything but the verify.

    It is (1 + T_draft / T_verify) E_ssd / E_sd, with the times of SD and E tokens per round.
    """
    parts = cell.parts_ms["sd"]
    draft, verify = (
        statistics.median(means[part] for means in parts) for part in ("draft", "verify")
    )
    tokens = [spreads(cell.figures[mode])["tokens_per_round"].median for mode in ("ssd", "sd")]
    return (1 + draft / verify) * tokens[0] / tokens[1]


def verify_bandwidth(results: Results, mode: str) -> float | None:
    """Return the rate at which a verify at batch 1 reads weights, in bytes/s; None without batch 1.

    A verify has one row in mode "ar", and lookahead + 1 rows in mode "ssd".
    """
    single = [cell for cell in results.cells if cell.batch == 1 and mode in cell.figures]
    if not single:
        return None
    milliseconds = spreads(single[0].figures[mode])["verify_ms"].median
    return results.weight_bytes / (milliseconds / 1000)


def records(results: Results, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one record for each figure: mode, median, quartiles, repetitions, settings."""
    rows = []
    for cell in results.cells:
        figures = {
            (mode, name): figure
            for mode, repetitions in cell.figures.items()
            for name, figure in spreads(repetitions).items()
        }
        for (mode, base), figure in speed_ups(cell).items():
            figures[f"{mode}/{base}", "speed_up"] = figure
        for (mode, name), figure in figures.items():
            rows.append(
                {
                    "workload": cell.data,
                    "batch": cell.batch,
                    "temperature": cell.temperature,
                    "mode": mode,
                    "figure": name,
                    **asdict(figure),
                    "repetitions": len(next(iter(cell.figures.values()))),
                    "is_usable": cell.is_usable,
                    "other_cpus": cell.other_cpus,
                    "settings": dict(settings),
                }
            )
    return rows


def markdown(results: Results, bandwidth: float) -> str:
    """Return the run as Markdown: a table of modes, then what concerns the whole run."""
    titles = ["data", "batch", "T", "mode", *COLUMNS.values(), "/ AR", "texts that differ"]
    rows = []
    for cell in results.cells:
        for mode, repetitions in cell.figures.items():
            figures = spreads(repetitions)
            row = [cell.data, str(cell.batch), f"{cell.temperature:g}", mode]
            row += [str(figures.get(name, "–")) for name in COLUMNS]
            row[4] += "" if cell.is_usable else ", busy"
            ratio = speed_ups(cell).get((mode, "ar"), "")
            row.append(str(ratio))
            is_last = mode == list(cell.figures)[-1]
            row.append(f"{cell.num_different} of {cell.num_compared}" if is_last else "")
            rows.append(row)
    lines = [
        *markdown_table(titles, rows),
        "",
        *whole_run(results, bandwidth),
        "",
        *rounds_markdown(round_records(results.cells)),
    ]
    return "\n".join(lines) + "\n"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head, *lines = (f"| {' | '.join(row)} |" for row in (titles, *rows))
    return [head, "|" + "---|" * len(titles), *lines]


def terminal_tables(results: Results) -> list[Table]:
    """Return the medians of each data set in a table for a terminal."""
    names = dict.fromkeys(cell.data for cell in results.cells)
    return [
        _terminal_table(name, [cell for cell in results.cells if cell.data == name])
        for name in names
    ]


def _terminal_table(data: str, cells: Sequence[Cell]) -> Table:
    table = Table(
        title=None if data == DEMO else data,
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for title in ("batch", "T", "mode", *_TERMINAL_COLUMNS.values(), "/ AR", "differ"):
        table.add_column(title, justify="right")
    for cell in cells:
        for mode, repetitions in cell.figures.items():
            figures = spreads(repetitions)
            shown = [
                f"{figures[name].median:.3g}" if name in figures else "–"
                for name in _TERMINAL_COLUMNS
            ]
            ratio = speed_ups(cell).get((mode, "ar"))
            is_last = mode == list(cell.figures)[-1]
            last = [
                f"{ratio.median:.2f}" if ratio else "",
                f"{cell.num_different}/{cell.num_compared}" if is_last else "",
            ]
            table.add_row(str(cell.batch), f"{cell.temperature:g}", mode, *shown, *last)
    return table


def whole_run(results: Results, bandwidth: float) -> list[str]:
    """Return lines about the whole run: start time, memory, bandwidth."""
    lines = [
        "Medians (quartiles) over interleaved repetitions.",
        f"- dtype of the target: {results.dtype} ({results.dtype_reason})",
        f"- start to ready: {results.ready_seconds:.1f} s",
        f"- peak memory: target {results.target_peak_bytes / 2**20:.0f} MiB, "
        f"draft {results.draft_peak_bytes / 2**20:.0f} MiB",
    ]
    for cell in results.cells:
        prefix = f"- {cell.data}, batch {cell.batch}, T={cell.temperature:g}: "
        lines += [prefix + line for line in over_sd(cell)]
        if not cell.is_usable:
            lines.append(f"{prefix}not usable, other work took CPUs")
    for mode in MODES:
        reached = verify_bandwidth(results, mode)
        if reached is not None:
            lines.append(
                f"- {mode}, batch 1: verify reads weights at {reached / 1e9:.1f} GB/s, "
                f"{reached / bandwidth:.0%} of one core's {bandwidth / 1e9:.1f} GB/s"
            )
    return lines


def over_sd(cell: Cell) -> list[str]:
    """Return lines that compare SSD with SD, and with modes that use as many CPUs."""
    ratios = speed_ups(cell)
    lines = []
    if ("ssd", "sd") in ratios:
        lines.append(f"SSD / SD {ratios['ssd', 'sd']}, bound {bound_over_sd(cell):.3g}")
    wide = [
        f"SSD / {base} {ratios['ssd', base]}" for base in ON_ALL_CPUS if ("ssd", base) in ratios
    ]
    if wide:
        lines.append(f"equal hardware: {', '.join(wide)}")
    return lines


def round_records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the parts of a round, mean milliseconds, of each cell and mode: JSON values."""
    return [
        {
            "workload": cell.data,
            "batch": cell.batch,
            "temperature": cell.temperature,
            "mode": mode,
            "parts_ms": {
                part: statistics.median(means[part] for means in repetitions) for part in PARTS
            },
        }
        for cell in cells
        for mode, repetitions in cell.parts_ms.items()
    ]


def rounds_markdown(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parts of a round as a Markdown table."""
    rows = []
    for entry in rounds:
        parts = entry["parts_ms"]
        numbers = [f"{number:.3g}" for number in (sum(parts.values()), *(parts[p] for p in PARTS))]
        case = (entry["workload"], str(entry["batch"]), f"{entry['temperature']:g}", entry["mode"])
        rows.append([*case, *numbers])
    return [
        "Milliseconds of a round by part (means; medians over repetitions).",
        "",
        *markdown_table(("data", "batch", "T", "mode", "round", *PARTS), rows),
    ]
