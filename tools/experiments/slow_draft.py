"""``slow-draft``: tokens/s against the speed of the draft.

The steps of its trees are made longer until a table takes, for example, four times as long as a
verify.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from matplotlib.figure import Figure
from rich.table import Table

from ssd.demo.corpus import held_out_prompts
from ssd.runtime.launch import Deployment
from ssd_bench.command import (
    MAX_BATCH,
    MAX_LENGTH,
    NUM_PROMPTS,
    PROMPT_CHARS,
    Branches,
    Debug,
    Draft,
    Dtype,
    Lookahead,
    MaxTokens,
    Numbers,
    Output,
    Repetitions,
    Target,
    Widening,
    check_factors,
    check_models,
    err,
    numbers,
    out,
    widened,
    with_progress,
)
from ssd_bench.metrics import Spread, spreads
from ssd_bench.plots import save
from ssd_bench.prompts import DEMO
from ssd_bench.report import speed_up
from ssd_bench.runs import BenchmarkRun, Cell, Results, run

STEPWISE_MS = 0.001
"""Added to each step at least, so that all drafts of a sweep run the same passes."""


def slow_draft(
    *,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    widen_target: Widening = 4,
    widen_draft: Widening = 1,
    ratios: Numbers = "0.5,1,1.5,2,4,8",
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    batch: Annotated[int, typer.Option(min=1, max=MAX_BATCH)] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    max_tokens: MaxTokens = 128,
    repetitions: Repetitions = 5,
    dtype: Dtype = "auto",
    backup: Annotated[
        Literal["none", "ngram"], typer.Option(help="Proposals after a miss or a late table.")
    ] = "none",
    name: Annotated[str, typer.Option(help="Name of the line in the plot.")] = "this version",
    compare: Annotated[
        list[Path] | None, typer.Option(help="slow_draft.json of another run, for the same plot.")
    ] = None,
    output: Output = Path("results"),
    debug: Debug = False,  # noqa: ARG001 - read by run_app
) -> None:
    """Measure SSD for ratios of T_table / T_verify; write slow_draft.json and a plot (PNG, PDF)."""
    check_models(target=target, draft=draft)
    check_factors(widen_target, widen_draft)
    wanted = numbers(ratios, "--ratios", float, 0.01, 100)
    earlier = [json.loads(path.read_text()) for path in compare or []]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            widened(model, factor, Path(scratch))
            for model, factor in ((target, widen_target), (draft, widen_draft))
        ]
        shape = ("--lookahead", str(lookahead), "--branches", str(branches))
        plan = BenchmarkRun(
            deployment=Deployment(
                target=str(folders[0]),
                draft=str(folders[1]),
                common_flags=(*shape, "--dtype", dtype, *MAX_LENGTH),
                target_flags=("--backup", backup),
            ),
            target_folder=folders[0],
            prompts={DEMO: held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS)},
            batches=(batch,),
            temperatures=(temperature,),
            max_tokens=max_tokens,
            repetitions=repetitions,
        )
        num_batches = (1 + len(wanted)) + 2 * (1 + len(wanted) * repetitions)
        points = with_progress(num_batches, lambda advance: sweep(plan, wanted, lookahead, advance))
    report = {"name": name, "points": list(map(asdict, points))}
    output.mkdir(parents=True, exist_ok=True)
    (output / "slow_draft.json").write_text(json.dumps(report, indent=1))
    draw({line["name"]: line["points"] for line in (*earlier, report)}, output / "slow_draft.png")
    out.print(terminal_table(points))
    err.print(f"written to {output}/slow_draft.json, slow_draft.png and slow_draft.pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Decoding with a draft whose table takes ``ratio`` times as long as a verify."""

    ratio: float
    verify_ms: Spread
    """Time of a verify of SSD in the same run; the delay was chosen for that of an earlier run."""
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
    plan: BenchmarkRun, ratios: Sequence[float], lookahead: int, on_batch: Callable[[], None]
) -> list[Point]:
    """Measure a plan of one cell with drafts of different speeds.

    The times of a verify and of a table without a delay are measured first. A ratio below that of
    the draft itself is raised to it.

    Raises:
        SSDError: a process cannot start, or a request failed.
    """
    plan = replace(plan, needs_hits=False, modes=("ar", "ssd"))
    stepwise = replace(plan, deployment=_slowed(plan.deployment, 0.0), repetitions=1)
    first = await run(stepwise, on_batch)
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
    # With no added time, a draft could build a table in one pass, which takes half the time.
    flags = (*deployment.draft_flags, "--inject-step-ms", f"{max(added, STEPWISE_MS):.3f}")
    return replace(deployment, draft_flags=flags)


def draw(series: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw speed-up and late rate against T_table / T_verify.

    Args:
        series: the points as JSON values, by the name of the line.
        path: the file to write.
    """
    figure = Figure(figsize=(7, 6), layout="constrained")
    speed, late = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    for name, points in series.items():
        ratios = [each["ratio"] for each in points]
        speed_ups = [each["speed_up"] for each in points]
        (line,) = speed.plot(ratios, [spread["median"] for spread in speed_ups], "o-", label=name)
        speed.fill_between(
            ratios,
            [spread["q1"] for spread in speed_ups],
            [spread["q3"] for spread in speed_ups],
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
    late.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    save(figure, path)
