"""Results of loads as tables and as JSON records."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ssd_bench.serve.figures import LoadFigures
from ssd_bench.serve.memory import MIB, MemoryFigures
from ssd_bench.serve.scenarios import Check, ScenarioResult


def records(result: ScenarioResult) -> dict[str, Any]:
    """Return a result as JSON values."""
    return {
        "name": result.name,
        "loads": {
            name: asdict(found)
            | {"errors": found.num_errors, "inter_token_p99_over_p50": found.p99_over_p50}
            for name, found in result.loads.items()
        },
        "figures": result.figures,
        "memory": {
            name: asdict(found) | {"growth_bytes": found.growth_bytes}
            for name, found in result.memory.items()
        },
        "checks": [asdict(check) | {"is_met": check.is_met} for check in result.checks],
    }


def tables(result: ScenarioResult) -> list[Table]:
    """Return a result as tables for a terminal."""
    found = [_loads(result.name, result.loads), _outcomes(result.loads)] if result.loads else []
    if result.figures:
        found.append(_figures(result.figures))
    if result.memory:
        found.append(_memory(result.memory))
    if result.checks:
        found.append(_checks(result.checks))
    return found


def _loads(title: str, loads: dict[str, LoadFigures]) -> Table:
    """Return one row for each load. Times are in milliseconds."""
    table = Table("", *_COLUMNS, title=title)
    for name, found in loads.items():
        table.add_row(name, *(column(found) for column in _COLUMNS.values()))
    return table


def _outcomes(loads: dict[str, LoadFigures]) -> Table:
    """Return how the requests of each load ended."""
    table = Table("requests", "outcomes", "refusal ms, p50 / p99 / max")
    for name, found in loads.items():
        ends = ", ".join(f"{n} {outcome}" for outcome, n in found.outcomes.items())
        times = found.refusal_ms
        refusals = " / ".join(map(_ms, (times.p50, times.p99, times.max))) if times.count else "-"
        table.add_row(name, ends, refusals)
    return table


def _figures(figures: dict[str, float]) -> Table:
    table = Table(show_header=False)
    for name, found in figures.items():
        table.add_row(name, f"{found:.4g}")
    return table


def _memory(memory: dict[str, MemoryFigures]) -> Table:
    table = Table("resident memory, MiB", "begin", "end", "peak", "growth")
    for name, found in memory.items():
        sizes = (found.begin_bytes, found.end_bytes, found.peak_bytes, found.growth_bytes)
        table.add_row(name, *(f"{each / MIB:.1f}" for each in sizes))
    return table


def _checks(checks: Sequence[Check]) -> Table:
    table = Table("check", "found", "bound", "result")
    for check in checks:
        sign = ">=" if check.is_minimum else "<="
        failed = "missed (a time)" if check.is_timing else "FAILED"
        table.add_row(
            check.name,
            f"{check.found:.3g}",
            f"{sign} {check.bound:.3g}",
            "ok" if check.is_met else f"{failed} {check.detail}".rstrip(),
        )
    return table


def _ms(found: float) -> str:
    return f"{found:.0f}" if found >= 100 else f"{found:.3g}"


_COLUMNS: dict[str, Callable[[LoadFigures], str]] = {
    "tokens/s": lambda each: f"{each.tokens_per_second:.1f}",
    "goodput": lambda each: f"{each.goodput_tokens_per_second:.1f}",
    "hit rate": lambda each: "-" if each.hit_rate is None else f"{each.hit_rate:.2f}",
    "TTFT p50": lambda each: _ms(each.time_to_first_token_ms.p50),
    "p99": lambda each: _ms(each.time_to_first_token_ms.p99),
    "inter-token p50": lambda each: _ms(each.inter_token_ms.p50),
    "p90": lambda each: _ms(each.inter_token_ms.p90),
    "p99 ": lambda each: _ms(each.inter_token_ms.p99),
    "max": lambda each: _ms(each.inter_token_ms.max),
    "generator p99": lambda each: _ms(each.client_lag_ms.p99),
}
"""Columns of the table of loads. The last one is the delay of the load generator itself."""
