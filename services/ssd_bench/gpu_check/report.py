"""The results of the checks: one line for each figure, a table at the end, and JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ssd_bench.gpu_check.outcome import Outcome
from ssd_bench.gpu_check.targets import verdicts

COLOURS = {"passed": "green", "failed": "red", "timed out": "yellow", "skipped": "yellow"}
TARGET_COLOURS = {"met": "green", "not met": "red", "not measured": "yellow"}


def lines(name: str, outcome: Outcome, seconds: float) -> Iterator[str]:
    """Yield the outcome of a check and its figures, as soon as it has ended."""
    reason = f": {outcome.reason}" if outcome.reason else ""
    yield f"{name}: {outcome.status} ({seconds:.0f} s){reason}"
    for figure, value in outcome.figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        yield f"  {figure:<40} {shown}"


def table(outcomes: Mapping[str, Outcome], seconds: Mapping[str, float]) -> Table:
    """Return the summary."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("check", "result", "s", "reason"):
        result.add_column(title, justify="right" if title == "s" else "left", overflow="fold")
    for name, outcome in outcomes.items():
        colour = COLOURS[outcome.status]
        result.add_row(
            name, f"[{colour}]{outcome.status}[/]", f"{seconds[name]:.0f}", outcome.reason
        )
    return result


def target_table(outcomes: Mapping[str, Outcome], device: str) -> Table:
    """Return the speed targets: the number, the bound, and whether it is met."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("speed target", "bound", "number", "result", "reason"):
        result.add_column(title, overflow="fold")
    for each in verdicts(outcomes, device):
        number = "" if each.value is None else f"{each.value:.4g}"
        shown = f"[{TARGET_COLOURS[each.result]}]{each.result}[/]"
        result.add_row(each.target, each.bound, number, shown, each.reason)
    return result


def as_json(
    outcomes: Mapping[str, Outcome],
    seconds: Mapping[str, float],
    device: str,
    *,
    is_complete: bool,
) -> dict[str, Any]:
    """Return the document of ``gpu_check.json``; only that of all checks is complete."""
    return {
        "device": device,
        "is_complete": is_complete,
        "targets": [asdict(each) for each in verdicts(outcomes, device)],
        "checks": {
            name: asdict(outcome) | {"seconds": round(seconds[name], 1)}
            for name, outcome in outcomes.items()
        },
    }
