"""``python -m ssd_bench``: plain and speculative decoding in one run."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text
from typer.exceptions import TyperException

from ssd import demo
from ssd.console import can_redraw, make_console, style_help
from ssd.demo.corpus import held_out_prompts
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.pass_time import WEIGHTS
from ssd.errors import (
    ModelNotFoundError,
    SettingsError,
    SSDError,
    UnsupportedModelError,
)
from ssd.launch import Deployment
from ssd.model_name import local_folder
from ssd.model_source import resolve
from ssd_bench.auto import auto
from ssd_bench.drawing import plots
from ssd_bench.machine import read_bandwidth
from ssd_bench.peers.command import peers
from ssd_bench.report import (
    markdown,
    records,
    round_records,
    rounds_markdown,
    terminal_table,
    whole_run,
)
from ssd_bench.runs import MODES, ON_ALL_CPUS, DifferentTextsError, Plan, Results, run
from ssd_bench.sampling.command import sampling
from ssd_bench.serve.command import serve
from ssd_bench.slow_draft import as_records, sweep
from ssd_bench.slow_draft import terminal_table as slow_draft_table

NUM_PROMPTS = 64
PROMPT_CHARS = 450
"""About 128 tokens, as in the model cards."""
MAX_BATCH = 16
"""Maximum batch size of a target. A larger batch would wait in its queue."""
out = make_console(soft_wrap=False)
err = make_console(stderr=True)
BAD_INPUT = (SettingsError, ModelNotFoundError, UnsupportedModelError)
"""Errors caused by the command line: exit code 2."""
Measured = TypeVar("Measured")
Lookahead = Annotated[int, typer.Option(min=1, max=16, help="Tokens of a proposal (K).")]
Branches = Annotated[int, typer.Option(min=1, max=128, help="Largest number of outcomes (N).")]
Widening = Annotated[int, typer.Option(help="Width factor; the model computes the same function.")]
Engine = Literal["auto", "openvino", "static", "torch"]
Numbers = Annotated[str, typer.Option(help="Numbers, separated by commas.")]


def bench(
    context: typer.Context,
    *,
    target: Annotated[str, typer.Option(help="Model folder or demo://target.")] = "demo://target",
    draft: Annotated[str, typer.Option(help="Model folder or demo://draft.")] = "demo://draft",
    widen_target: Widening = 1,
    widen_draft: Widening = 1,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    batch: Numbers = "1,8",
    temperature: Numbers = "0,1",
    max_tokens: Annotated[int, typer.Option(min=16)] = 128,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Data type of weights and KV.")
    ] = "auto",
    engine: Annotated[Engine, typer.Option(help="What executes the forward passes.")] = "auto",
    deadline_ms: Annotated[float, typer.Option(help="Table deadline in milliseconds.")] = 100.0,
    deterministic: bool = False,
    equal_hardware: Annotated[
        bool,
        typer.Option(help="Also measure AR and SD with a target on all CPUs."),
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
    is_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces.")] = False,
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
        plan = Plan(
            deployment=Deployment(
                target=str(folders[0]),
                draft=str(folders[1]),
                common_flags=(*flags, "--max-model-len", "1024"),
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
        results = _run(plan)
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


def slow_draft(
    *,
    target: Annotated[str, typer.Option(help="Model folder or demo://target.")] = "demo://target",
    draft: Annotated[str, typer.Option(help="Model folder or demo://draft.")] = "demo://draft",
    widen_target: Widening = 4,
    widen_draft: Widening = 1,
    ratios: Annotated[
        str, typer.Option(help="T_table / T_verify, separated by commas.")
    ] = "0.5,1,1.5,2,4,8",
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    batch: Annotated[int, typer.Option(min=1, max=MAX_BATCH)] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=16)] = 128,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Data type of weights and KV.")
    ] = "auto",
    engine: Annotated[Engine, typer.Option(help="What executes the forward passes.")] = "auto",
    backup: Annotated[
        Literal["none", "ngram"], typer.Option(help="Proposals after a miss or a late table.")
    ] = "none",
    name: Annotated[str, typer.Option(help="Name of the line in the plot.")] = "this version",
    compare: Annotated[
        list[Path] | None, typer.Option(help="slow_draft.json of another run, for the same plot.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces.")] = False,
) -> None:
    """Measure SSD with drafts of different speeds; write slow_draft.json and slow_draft.png."""
    del debug
    check_models(target, draft, widen_target, widen_draft)
    wanted = numbers(ratios, "--ratios", 0.01, 100)
    drawing = plots()
    earlier = [json.loads(path.read_text()) for path in compare or []]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            widened(model, factor, Path(scratch))
            for model, factor in ((target, widen_target), (draft, widen_draft))
        ]
        shape = ("--lookahead", str(lookahead), "--branches", str(branches))
        flags = (*shape, "--dtype", dtype, "--engine", engine)
        plan = Plan(
            deployment=Deployment(
                target=str(folders[0]),
                draft=str(folders[1]),
                common_flags=(*flags, "--max-model-len", "1024"),
                target_flags=("--backup", backup),
            ),
            target_folder=folders[0],
            prompts=held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS),
            batches=(batch,),
            temperatures=(temperature,),
            max_tokens=max_tokens,
            repetitions=repetitions,
        )
        num_batches = (1 + len(wanted)) + 2 * (1 + len(wanted) * repetitions)
        points = _with_progress(
            num_batches, lambda advance: sweep(plan, wanted, lookahead, advance)
        )
    found = {"name": name, "points": as_records(points)}
    output.mkdir(parents=True, exist_ok=True)
    (output / "slow_draft.json").write_text(json.dumps(found, indent=1))
    series = {each["name"]: each["points"] for each in (*earlier, found)}
    drawing.draw_slow_draft(series, output / "slow_draft.png")
    out.print(slow_draft_table(points))
    err.print(f"written to {output}/slow_draft.json and slow_draft.png")


def rounds(
    *,
    target: Annotated[str, typer.Option(help="Model folder or demo://target.")] = "demo://target",
    draft: Annotated[str, typer.Option(help="Model folder or demo://draft.")] = "demo://draft",
    vocabulary: Annotated[
        int,
        typer.Option(min=0, help="Pad both vocabularies to this many ids; 0: do not."),
    ] = 0,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    batch: Numbers = "1,8,16",
    temperature: Numbers = "0,1",
    modes: Annotated[str, typer.Option(help="ar, sd, ssd, separated by commas.")] = "ssd",
    max_tokens: Annotated[int, typer.Option(min=16)] = 64,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Data type of weights and KV.")
    ] = "auto",
    name: Annotated[str, typer.Option(help="Name of the bars in the plot.")] = "this version",
    compare: Annotated[
        list[Path] | None, typer.Option(help="rounds.json of another run, for the same plot.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
    is_json: Annotated[bool, typer.Option("--json", help="Print rounds.json.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces.")] = False,
) -> None:
    """Measure where a round spends its time; write rounds.json, rounds.md and rounds.png."""
    del debug
    check_models(target, draft, 1, 1)
    chosen = tuple(modes.split(","))
    if not set(chosen) <= set(MODES):
        raise typer.BadParameter(f"--modes {modes!r}: choose of {', '.join(MODES)}")
    drawing = plots()
    earlier = [json.loads(path.read_text()) for path in compare or []]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [padded(model, vocabulary, Path(scratch)) for model in (target, draft)]
        flags = ("--lookahead", str(lookahead), "--branches", str(branches), "--dtype", dtype)
        plan = Plan(
            deployment=Deployment(
                target=str(folders[0]),
                draft=str(folders[1]),
                common_flags=(*flags, "--max-model-len", "1024"),
            ),
            target_folder=folders[0],
            prompts=held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS),
            batches=tuple(int(number) for number in numbers(batch, "--batch", 1, MAX_BATCH)),
            temperatures=numbers(temperature, "--temperature", 0, 2),
            max_tokens=max_tokens,
            repetitions=repetitions,
            needs_hits=False,
            modes=chosen,
        )
        results = _run(plan)
    found = round_records(results.cells)
    table = "\n".join(rounds_markdown(found))
    bars = {each["name"]: each["rounds"] for each in earlier} | {name: found}
    output.mkdir(parents=True, exist_ok=True)
    as_json = json.dumps({"name": name, "rounds": found}, indent=1)
    (output / "rounds.json").write_text(as_json)
    (output / "rounds.md").write_text(table + "\n")
    drawing.draw_rounds(bars, output / "rounds.png")
    if is_json:
        out.print_json(as_json)
    else:
        out.print(table, soft_wrap=True)
        err.print(f"written to {output}/rounds.json, rounds.md and rounds.png")


def cpu_draft(
    *,
    models: Annotated[
        str, typer.Option(help="Known shapes, separated by commas.")
    ] = "qwen3-0.6b,llama-3.2-1b",
    weights: Annotated[
        str, typer.Option(help="bfloat16, int8, int4, separated by commas.")
    ] = "bfloat16,int8,int4",
    repetitions: Annotated[int, typer.Option(min=1)] = 15,
    bandwidth: Annotated[
        float, typer.Option(min=1.0, help="GB/s of the server of the predictions.")
    ] = 220.0,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder that keeps the random weights for the next run.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces.")] = False,
) -> None:
    """Measure steps of drafts on CPUs, with random weights; write cpu_draft.json and .md."""
    del debug
    names, formats = (tuple(text.split(",")) for text in (models, weights))
    for flag, given, known in (
        ("--models", names, KNOWN_SHAPES),
        ("--weights", formats, WEIGHTS),
    ):
        if not set(given) <= set(known):
            raise typer.BadParameter(f"{flag} {','.join(given)!r}: choose of {', '.join(known)}")
    # Imports torch.
    from ssd_bench import cpu_draft as bench_of_drafts  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as temporary:
        found = bench_of_drafts.measure(
            names,
            formats,
            scratch or Path(temporary),
            repetitions=repetitions,
            server_bytes_per_second=bandwidth * 1e9,
        )
    table = bench_of_drafts.markdown(found)
    output.mkdir(parents=True, exist_ok=True)
    (output / "cpu_draft.json").write_text(json.dumps(asdict(found), indent=1))
    (output / "cpu_draft.md").write_text(table + "\n")
    out.print(table, soft_wrap=True)


def check_models(target: str, draft: str, widen_target: int, widen_draft: int) -> None:
    """Check that the models are folders and the factors known, before anything is loaded.

    Raises:
        ModelNotFoundError: a folder is not a model.
        typer.BadParameter: a factor is not offered.
    """
    for model in (target, draft):
        local_folder(model)
    for flag, factor in (("--widen-target", widen_target), ("--widen-draft", widen_draft)):
        if factor not in demo.FACTORS:
            allowed = ", ".join(str(each) for each in demo.FACTORS)
            raise typer.BadParameter(f"{flag} {factor}: choose one of {allowed}")


def numbers(text: str, flag: str, lowest: float, highest: float) -> tuple[float, ...]:
    """Convert a list like ``1,8``.

    Raises:
        typer.BadParameter: the text is not a list of numbers, or a number is out of bounds.
    """
    try:
        found = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{flag} {text!r}: must be numbers, separated by commas") from None
    if not all(lowest <= number <= highest for number in found):
        raise typer.BadParameter(f"{flag} {text!r}: each must be in {lowest:g}..{highest:g}")
    return found


def widened(model: str, factor: int, scratch: Path) -> Path:
    """Return the folder of a model, or of a wider model of the same function made in ``scratch``.

    Raises:
        SetupError: the model cannot be found, fetched or widened.
    """
    folder = resolve(model)
    if factor == 1:
        return folder
    # Imports torch, which only a wider model needs.
    from ssd.demo.widen import widen  # noqa: PLC0415

    err.print(f"widening {model} {factor} times")
    return widen(folder, factor, scratch / f"{folder.name}-{factor}")


def padded(model: str, vocabulary: int, scratch: Path) -> Path:
    """Return the folder of a model, or of one made in ``scratch`` with a larger vocabulary.

    Raises:
        SetupError: the model cannot be found or padded.
    """
    folder = resolve(model)
    if not vocabulary:
        return folder
    # Imports torch, which only another vocabulary needs.
    from ssd.demo.widen import pad_vocabulary  # noqa: PLC0415

    err.print(f"padding the vocabulary of {model} to {vocabulary} ids")
    return pad_vocabulary(folder, vocabulary, scratch / f"{folder.name}-{vocabulary}")


def _run(plan: Plan) -> Results:
    return _with_progress(plan.num_batches, lambda advance: run(plan, advance))


def _with_progress(
    total: int, measure: Callable[[Callable[[], None]], Coroutine[Any, Any, Measured]]
) -> Measured:
    """Measure with a progress bar, which ``measure`` advances after each of ``total`` batches."""
    parts = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_off = not can_redraw(err)
    with Progress(
        "{task.description}", *parts, console=err, transient=True, disable=is_off
    ) as progress:
        task = progress.add_task("batches", total=total)
        return asyncio.run(measure(lambda: progress.advance(task)))


def main(argv: Sequence[str] | None = None, prog_name: str = "python -m ssd_bench") -> int:
    """Run a command line; return its exit code.

    Args:
        argv: the arguments without the program name; None: those of this process.
        prog_name: name of the program in help and usage errors.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(bench)
    app.command()(slow_draft)
    app.command()(auto)
    app.command()(rounds)
    app.command()(cpu_draft)
    app.command()(peers)
    app.command()(sampling)
    app.command()(serve)
    style_help()
    is_debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        return int(app(argv, prog_name=prog_name, standalone_mode=False) or 0)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command = prog_name if context is None else context.command_path
        return _fail(f"{error.format_message()} (see: {command} --help)", 2)
    except SSDError as error:
        if is_debug:
            raise
        return _fail(str(error), 2 if isinstance(error, BAD_INPUT) else 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _fail(message: str, code: int) -> int:
    err.print(Text.assemble(("error:", "red"), " ", " ".join(message.split())))
    return code


if __name__ == "__main__":
    sys.exit(main())
