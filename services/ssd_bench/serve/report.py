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
    found = [_loads(result.name, result.loads), _times(result.loads)] if result.loads else []
    if result.figures:
        found.append(_figures(result.figures))
    if result.memory:
        found.append(_memory(result.memory))
    if result.checks:
        found.append(_checks(result.checks))
    return found


def _loads(title: str, loads: dict[str, LoadFigures]) -> Table:
    """Return how the requests of each load ended, and its speeds."""
    table = Table("", "outcomes", "tokens/s", "goodput", "hit rate", title=title)
    for name, found in loads.items():
        table.add_row(
            name,
            ", ".join(f"{n} {outcome}" for outcome, n in found.outcomes.items()),
            f"{found.tokens_per_second:.1f}",
            f"{found.goodput_tokens_per_second:.1f}",
            "-" if found.hit_rate is None else f"{found.hit_rate:.2f}",
        )
    return table


def _times(loads: dict[str, LoadFigures]) -> Table:
    """Return the times of each load. The last one is the delay of the load generator itself."""
    table = Table("milliseconds", *_TIMES)
    for name, found in loads.items():
        table.add_row(name, *(_ms(time(found)) for time in _TIMES.values()))
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


_TIMES: dict[str, Callable[[LoadFigures], float]] = {
    "TTFT\np50": lambda each: each.time_to_first_token_ms.p50,
    "\np99": lambda each: each.time_to_first_token_ms.p99,
    "token\np50": lambda each: each.inter_token_ms.p50,
    "\np90": lambda each: each.inter_token_ms.p90,
    "\np99 ": lambda each: each.inter_token_ms.p99,
    "\nmax": lambda each: each.inter_token_ms.max,
    "refusal\np99": lambda each: each.refusal_ms.p99,
    "generator\np99": lambda each: each.client_lag_ms.p99,
}
"""Titles and values of the table of times; ``token`` is the inter-token time."""
