"""Results as tables and as JSON records."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ssd_bench.metrics import Spread, spread, spreads
from ssd_bench.runs import MODES, Cell, Results

COLUMNS = {
    "tokens_per_second": "tokens/s",
    "tokens_per_second_each": "each",
    "tokens_per_second_per_cpu": "per CPU",
    "hit_rate": "hit rate",
    "late_rate": "late",
    "tokens_per_round": "tokens per round",
    "verify_ms": "verify ms",
    "round_ms": "round ms",
    "efficiency": "efficiency",
    "time_to_first_token_ms": "TTFT ms",
}


_TERMINAL_COLUMNS = {
    name: title
    for name, title in COLUMNS.items()
    if name not in ("tokens_per_second_each", "late_rate") and not name.endswith("_ms")
}
"""Columns that fit a terminal with 80 columns. The files contain all of them."""


def speed_up(cell: Cell) -> Spread:
    """Return tokens/s of SSD / AR for each pair of interleaved repetitions."""
    pairs = zip(cell.figures["ar"], cell.figures["ssd"], strict=True)
    return spread([ssd.tokens_per_second / ar.tokens_per_second for ar, ssd in pairs])


def verify_bandwidth(results: Results, mode: str) -> float | None:
    """Return the rate at which a verify at batch 1 reads weights, in bytes/s; None without batch 1.

    A verify has one row in mode "ar", and lookahead + 1 rows in mode "ssd".
    """
    single = [cell for cell in results.cells if cell.batch == 1]
    if not single:
        return None
    milliseconds = spreads(single[0].figures[mode])["verify_ms"].median
    return results.weight_bytes / (milliseconds / 1000)


def records(results: Results, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one record for each figure: mode, median, quartiles, repetitions, settings."""
    found = []
    for cell in results.cells:
        figures = {
            (mode, name): value
            for mode, repetitions in cell.figures.items()
            for name, value in spreads(repetitions).items()
        }
        figures["ssd/ar", "speed_up"] = speed_up(cell)
        for (mode, name), value in figures.items():
            found.append(
                {
                    "workload": "demo",
                    "batch": cell.batch,
                    "temperature": cell.temperature,
                    "mode": mode,
                    "figure": name,
                    "median": value.median,
                    "q1": value.q1,
                    "q3": value.q3,
                    "repetitions": len(cell.figures["ar"]),
                    "settings": dict(settings),
                }
            )
    return found


def markdown(results: Results, bandwidth: float) -> str:
    """Return the run as Markdown: a table of modes, then what concerns the whole run."""
    header = ["batch", "T", "mode", *COLUMNS.values(), "SSD/AR", "texts that differ"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for cell in results.cells:
        for mode, repetitions in cell.figures.items():
            found = spreads(repetitions)
            row = [str(cell.batch), f"{cell.temperature:g}", mode]
            row += [str(found.get(name, "–")) for name in COLUMNS]
            is_ssd = mode == "ssd"
            row.append(str(speed_up(cell)) if is_ssd else "")
            row.append(f"{cell.num_different} of {cell.num_compared}" if is_ssd else "")
            lines.append("| " + " | ".join(row) + " |")
    lines += ["", *whole_run(results, bandwidth)]
    return "\n".join(lines) + "\n"


def terminal_table(results: Results) -> Table:
    """Return the medians in a table for a terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title in ("batch", "T", "mode", *_TERMINAL_COLUMNS.values(), "SSD/AR", "differ"):
        table.add_column(title, justify="right")
    for cell in results.cells:
        for mode, repetitions in cell.figures.items():
            found = spreads(repetitions)
            shown = [
                f"{found[name].median:.3g}" if name in found else "–" for name in _TERMINAL_COLUMNS
            ]
            last = ["", ""]
            if mode == "ssd":
                last = [f"{speed_up(cell).median:.2f}", f"{cell.num_different}/{cell.num_compared}"]
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
    for mode in MODES:
        reached = verify_bandwidth(results, mode)
        if reached is not None:
            lines.append(
                f"- {mode}, batch 1: verify reads weights at {reached / 1e9:.1f} GB/s, "
                f"{reached / bandwidth:.0%} of one core's {bandwidth / 1e9:.1f} GB/s"
            )
    return lines
