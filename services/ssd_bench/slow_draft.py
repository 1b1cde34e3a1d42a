"""Tokens/s against the speed of the draft.

The steps of its trees are made longer until a table takes, for example, four times as long as a
verify.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from ssd.launch import Deployment
from ssd_bench.metrics import Spread, spreads
from ssd_bench.report import speed_up
from ssd_bench.runs import Cell, Plan, Results, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Decoding with a draft whose table takes ``ratio`` times as long as a verify."""

    ratio: float
    verify_ms: Spread
    """Of SSD in the same run, which may differ from the one for which the delay was chosen."""
    added_step_ms: float
    speed_up: Spread
    """tokens/s of SSD / AR."""
    tokens_per_second: Spread
    ar_tokens_per_second: Spread
    tokens_per_round: Spread
    hit_rate: float
    """0 if no round needed a table."""
    late_rate: float
    num_different: int
    """Texts that differ from those of AR."""


async def sweep(
    plan: Plan, ratios: Sequence[float], lookahead: int, on_batch: Callable[[], None]
) -> list[Point]:
    """Measure a plan of one cell with drafts of different speeds.

    The times of a verify and of a table without a delay are measured first. A ratio below that of
    the draft itself is raised to it.

    Raises:
        SSDError: a process cannot start, or a request failed.
    """
    plan = replace(plan, needs_hits=False, modes=("ar", "ssd"))
    first = await run(replace(plan, repetitions=1), on_batch)
    verify_ms = spreads(_cell(first).figures["ssd"])["verify_ms"].median
    table_ms = first.table_seconds * 1000
    points = []
    for ratio in ratios:
        added = added_step_ms(ratio, verify_ms, table_ms, lookahead)
        deployment = _slowed(plan.deployment, added)
        results = await run(replace(plan, deployment=deployment), on_batch)
        points.append(point(_cell(results), table_ms + lookahead * added, added))
    return points


def added_step_ms(ratio: float, verify_ms: float, table_ms: float, lookahead: int) -> float:
    """Return how much longer each step must take for T_table / T_verify = ratio, at least 0."""
    return max(0.0, (ratio * verify_ms - table_ms) / lookahead)


def point(cell: Cell, table_ms: float, added: float) -> Point:
    """Return the figures of a cell, whose tables take ``table_ms``."""
    ssd, ar = spreads(cell.figures["ssd"]), spreads(cell.figures["ar"])
    nothing = Spread(0.0, 0.0, 0.0)
    return Point(
        ratio=table_ms / ssd["verify_ms"].median,
        verify_ms=ssd["verify_ms"],
        added_step_ms=added,
        speed_up=speed_up(cell),
        tokens_per_second=ssd["tokens_per_second"],
        ar_tokens_per_second=ar["tokens_per_second"],
        tokens_per_round=ssd["tokens_per_round"],
        hit_rate=ssd.get("hit_rate", nothing).median,
        late_rate=ssd.get("late_rate", nothing).median,
        num_different=cell.num_different,
    )


def as_records(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the points as JSON values."""
    return [asdict(each) for each in points]


def terminal_table(points: Sequence[Point]) -> Table:
    """Return the points as a table."""
    table = Table(title="a slower draft")
    for title in (
        "T_table / T_verify",
        "SSD / AR",
        "tokens/s",
        "hit rate",
        "late",
        "tokens per round",
    ):
        table.add_column(title, justify="right")
    for each in points:
        table.add_row(
            f"{each.ratio:.2g}",
            str(each.speed_up),
            f"{each.tokens_per_second.median:.3g}",
            f"{each.hit_rate:.2f}",
            f"{each.late_rate:.2f}",
            f"{each.tokens_per_round.median:.2f}",
        )
    return table


def _cell(results: Results) -> Cell:
    (cell,) = results.cells
    return cell


def _slowed(deployment: Deployment, added: float) -> Deployment:
    flags = (*deployment.draft_flags, "--inject-step-ms", f"{added:.3f}")
    return replace(deployment, draft_flags=flags)
