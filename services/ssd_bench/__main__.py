"""``python -m ssd_bench``: plain and speculative decoding in one run."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from ssd.console import run_app
from ssd.errors import SettingsError, SetupError
from ssd.rpc.codec import BackupName
from ssd.runtime.launch import Deployment
from ssd.text.tokenizer import load_tokenizer
from ssd_bench.command import (
    MAX_BATCH,
    MAX_LENGTH,
    PROMPT_CHARS,
    Branches,
    Data,
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
    check_factors,
    check_models,
    err,
    numbers,
    only_writer,
    out,
    plots,
    print_json,
    run_plan,
    widened,
)
from ssd_bench.machine import machine, read_bandwidth
from ssd_bench.peers.command import peers
from ssd_bench.prompts import DEMO, data_sets, encoded, read_texts
from ssd_bench.report import markdown, records, round_records, terminal_tables, whole_run
from ssd_bench.runs import MODES, ON_ALL_CPUS, BenchmarkRun, DifferentTextsError
from ssd_bench.sampling.command import sampling
from ssd_bench.serve import serve
from ssd_bench.stand_ins import data as data_command

PLOTS = ("speed_up", "efficiency", "hit_rate", "rounds")
"""Plots of a run; a figure of one point has none."""


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
    data: Data = [DEMO],  # noqa: B006 - typer copies it
    num_prompts: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Most prompts of a data set.")
    ] = 64,
    prompt_tokens: Annotated[
        int, typer.Option(min=8, max=1000, help="Most tokens of a prompt; longer ones are cut.")
    ] = 512,
    max_tokens: MaxTokens = 128,
    repetitions: Repetitions = 5,
    dtype: Dtype = "auto",
    engine: Engine = "auto",
    deadline_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="Table deadline in milliseconds.")
    ] = 100.0,
    backup: Annotated[
        BackupName, typer.Option(help="What proposes after a miss, and in texts that repeat.")
    ] = "ngram",
    deterministic: bool = False,
    equal_hardware: Annotated[
        bool, typer.Option(help="Also measure AR and SD with a target on all CPUs.")
    ] = False,
    output: Output = Path("results"),
    is_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure AR, SD and SSD in one run; write results.json, results.md and plots."""
    options = dict(locals())
    if context.invoked_subcommand is not None:
        _refuse_early_flags(context, options)
        return
    # ``main`` reads --debug. None of these is a setting of the measurement.
    del options["debug"], options["is_json"], options["context"]
    check_models(target=target, draft=draft)
    check_factors(widen_target, widen_draft)
    settings = {name: str(value) for name, value in options.items()}
    batches = numbers(batch, "--batch", int, 1, MAX_BATCH)
    temperatures = numbers(temperature, "--temperature", float, 0, 2)
    texts = {
        name: read_texts(file, num_prompts, num_chars=PROMPT_CHARS)
        for name, file in data_sets(data).items()
    }
    with only_writer(output), tempfile.TemporaryDirectory() as scratch:
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
                # All modes get the same prompts. The first one would store them for the others.
                common_flags=(*flags, *MAX_LENGTH, "--no-prefix-cache"),
                target_flags=(
                    *("--draft-deadline-ms", str(deadline_ms), "--backup", backup),
                    *(("--deterministic",) if deterministic else ()),
                ),
            ),
            target_folder=folders[0],
            prompts=encoded(texts, load_tokenizer(folders[0]), prompt_tokens),
            batches=tuple(sorted(batches)),
            temperatures=tuple(sorted(temperatures)),
            max_tokens=max_tokens,
            repetitions=repetitions,
            # With other data than the demo alone, a cell without hits is a result.
            needs_hits=list(texts) == [DEMO],
            modes=(*MODES, *(ON_ALL_CPUS if equal_hardware else ())),
        )
        results = run_plan(plan)
        bandwidth = read_bandwidth([min(os.sched_getaffinity(0))])
        contents = {
            "machine": machine(),
            "records": records(results, settings),
            "rounds": round_records(results.cells),
            "dtype": results.dtype,
            "dtype_reason": results.dtype_reason,
            "ready_seconds": results.ready_seconds,
            "target_peak_bytes": results.target_peak_bytes,
            "draft_peak_bytes": results.draft_peak_bytes,
            "read_bandwidth_bytes_per_second": bandwidth,
        }
        names = write(contents, markdown(results, bandwidth), output)
    if is_json:
        print_json(contents)
    else:
        out.print(*terminal_tables(results), sep="\n")
        out.print("\n".join(whole_run(results, bandwidth)), soft_wrap=True)
        err.print(f"written to {output}: {', '.join(names)}")
    num_different = sum(cell.num_different for cell in results.cells)
    if num_different:
        raise DifferentTextsError(f"{num_different} texts differ from those of plain decoding")


def _refuse_early_flags(context: typer.Context, names: Iterable[str]) -> None:
    """Refuse flags before the name of another command, which would have no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if name != "debug" and source is not None and source.name == "COMMANDLINE":
            flag = "--json" if name == "is_json" else f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{flag}: write it after {context.invoked_subcommand}")


def write(contents: Mapping[str, Any], table: str, output: Path) -> list[str]:
    """Write results.json, results.md and, with matplotlib, the plots; return the names."""
    # Those of an earlier run show other results, and not every run has each of them.
    for name, ending in product(PLOTS, ("png", "pdf")):
        (output / f"{name}.{ending}").unlink(missing_ok=True)
    (output / "results.json").write_text(json.dumps(contents, indent=1))
    (output / "results.md").write_text(table, encoding="utf-8")
    try:
        drawn = plots().draw_results([contents], output)
    except SetupError as error:
        err.print(f"no plots: {error}")
        drawn = []
    return ["results.json", "results.md", *drawn]


def plots_of(
    files: Annotated[list[Path], typer.Argument(help="results.json of one or more runs.")],
    *,
    output: Output = Path("results"),
    debug: Debug = False,  # noqa: ARG001 - read by ``run_app``
) -> None:
    """Draw runs of ``ssd bench`` again: speed-up, efficiency, hit rate, parts of a round.

    Several runs are in one plot; runs with different --branches give the hit rate against N.
    """
    runs = [_read_results(file) for file in files]
    try:
        names = plots().draw_results(runs, output)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        listed = ", ".join(map(str, files))
        raise _no_results(listed, f"they cannot be drawn: {error}") from None
    if not names:
        raise _no_results(", ".join(map(str, files)), "they have nothing to draw")
    err.print(f"written to {output}: {', '.join(names)}")


def _read_results(file: Path) -> dict[str, Any]:
    try:
        results = json.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}; name a results.json") from None
    except (ValueError, RecursionError):
        raise _no_results(str(file), "no JSON") from None
    if not isinstance(results, dict) or "records" not in results:
        raise _no_results(str(file), "it has no records")
    return results


def _no_results(files: str, reason: str) -> SettingsError:
    return SettingsError(f"{files}: not results.json of 'ssd bench' ({reason})")


def main(argv: Sequence[str] | None = None, prog_name: str = "python -m ssd_bench") -> int:
    """Run a command line; return its exit code. The arguments are those of ``run_app``.

    SIGTERM and SIGHUP end it as Ctrl-C does, so that it deletes the widened models.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(bench)
    app.command()(data_command)
    app.command()(peers)
    app.command("plots")(plots_of)
    app.command()(sampling)
    app.command()(serve)
    with _interrupted_by(signal.SIGTERM, signal.SIGHUP) as received:
        code = run_app(app, argv, prog_name)
    return 128 + received[0] if received else code


@contextlib.contextmanager
def _interrupted_by(*numbers: signal.Signals) -> Iterator[list[int]]:
    """Interrupt the main thread at the first of these signals; yields the list of that signal.

    In another thread, which Python does not let handle signals, it does nothing.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        on_interrupt = signal.getsignal(signal.SIGINT)
        if callable(on_interrupt):
            on_interrupt(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    # nohup ignores SIGHUP.
    defaults = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, interrupt) for number in defaults}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
