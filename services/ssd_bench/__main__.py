"""``python -m ssd_bench``: plain and speculative decoding in one run."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

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
    Engine,
    Json,
    Lookahead,
    MaxTokens,
    Numbers,
    Output,
    Repetitions,
    Target,
    Widening,
    check_models,
    err,
    numbers,
    out,
    run_app,
    run_plan,
    widened,
)
from ssd_bench.machine import read_bandwidth
from ssd_bench.peers.command import peers
from ssd_bench.report import markdown, records, round_records, terminal_table, whole_run
from ssd_bench.runs import MODES, ON_ALL_CPUS, BenchmarkRun, DifferentTextsError
from ssd_bench.sampling.command import sampling
from ssd_bench.serve import serve


def bench(
    context: typer.Context,
    *,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    widen_target: Widening = 1,
    widen_draft: Widening = 1,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    batch: Numbers = "1,8",
    temperature: Numbers = "0,1",
    max_tokens: MaxTokens = 128,
    repetitions: Repetitions = 5,
    dtype: Dtype = "auto",
    engine: Engine = "auto",
    deadline_ms: Annotated[float, typer.Option(help="Table deadline in milliseconds.")] = 100.0,
    deterministic: bool = False,
    equal_hardware: Annotated[
        bool, typer.Option(help="Also measure AR and SD with a target on all CPUs.")
    ] = False,
    output: Output = Path("results"),
    is_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure AR, SD and SSD in one run on held-out prompts; write results.json and results.md."""
    given = dict(locals())
    if context.invoked_subcommand is not None:
        return
    # ``main`` reads --debug. None of these is a setting of the measurement.
    del given["debug"], given["is_json"], given["context"]
    check_models(target, draft, widen_target, widen_draft)
    settings = {name: str(value) for name, value in given.items()}
    batches = tuple(int(number) for number in numbers(batch, "--batch", 1, MAX_BATCH))
    temperatures = numbers(temperature, "--temperature", 0, 2)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            widened(model, factor, Path(scratch))
            for model, factor in ((target, widen_target), (draft, widen_draft))
        ]
        shape = ("--lookahead", str(lookahead), "--branches", str(branches))
        flags = (*shape, "--dtype", dtype, "--engine", engine)
        plan = BenchmarkRun(
            deployment=Deployment(
                target=str(folders[0]),
                draft=str(folders[1]),
                common_flags=(*flags, *MAX_LENGTH),
                target_flags=(
                    *("--draft-deadline-ms", str(deadline_ms)),
                    *(("--deterministic",) if deterministic else ()),
                ),
            ),
            target_folder=folders[0],
            prompts=held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS),
            batches=batches,
            temperatures=temperatures,
            max_tokens=max_tokens,
            repetitions=repetitions,
            modes=(*MODES, *(ON_ALL_CPUS if equal_hardware else ())),
        )
        results = run_plan(plan)
    bandwidth = read_bandwidth([min(os.sched_getaffinity(0))])
    found = {
        "records": records(results, settings),
        "rounds": round_records(results.cells),
        "dtype": results.dtype,
        "dtype_reason": results.dtype_reason,
        "ready_seconds": results.ready_seconds,
        "target_peak_bytes": results.target_peak_bytes,
        "draft_peak_bytes": results.draft_peak_bytes,
        "read_bandwidth_bytes_per_second": bandwidth,
    }
    table = markdown(results, bandwidth)
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text(json.dumps(found, indent=1))
    (output / "results.md").write_text(table)
    if is_json:
        out.print_json(json.dumps(found))
    else:
        out.print(terminal_table(results))
        out.print("\n".join(whole_run(results, bandwidth)), soft_wrap=True)
        err.print(f"written to {output}/results.json and results.md")
    num_different = sum(cell.num_different for cell in results.cells)
    if num_different:
        raise DifferentTextsError(f"{num_different} texts differ from those of plain decoding")


def main(argv: Sequence[str] | None = None, prog_name: str = "python -m ssd_bench") -> int:
    """Run a command line; return its exit code. The arguments are those of ``run_app``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(bench)
    app.command()(peers)
    app.command()(sampling)
    app.command()(serve)
    return run_app(app, argv, prog_name)


if __name__ == "__main__":
    sys.exit(main())
