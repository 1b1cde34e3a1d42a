"""What the commands of benchmarks share: flags, models, progress and results."""

import asyncio
import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar

import typer

from ssd import demo
from ssd.console import make_console, progress
from ssd.errors import SettingsError, SetupError
from ssd.model_files.folder_contents import problem_of
from ssd.model_files.model_name import check_name, local_folder
from ssd.model_files.model_source import resolve
from ssd_bench.runs import BenchmarkRun, Results, run

NUM_PROMPTS = 64
PROMPT_CHARS = 450
"""About 128 tokens, as in the model cards."""
MAX_BATCH = 16
"""Maximum batch size of a target. A larger batch would wait in its queue."""
MAX_LENGTH = ("--max-model-len", "1024")
out = make_console(soft_wrap=False)
err = make_console(stderr=True)
Measured = TypeVar("Measured")
N = TypeVar("N", int, float)
Target = Annotated[str, typer.Option(help="Model folder or demo://target.")]
Draft = Annotated[str, typer.Option(help="Model folder or demo://draft.")]
Lookahead = Annotated[int, typer.Option(min=1, max=16, help="Tokens of a proposal (K).")]
Branches = Annotated[int, typer.Option(min=1, max=128, help="Largest number of outcomes (N).")]
Widening = Annotated[int, typer.Option(help="Width factor; the model computes the same function.")]
Numbers = Annotated[str, typer.Option(help="Numbers, separated by commas.")]
MaxTokens = Annotated[int, typer.Option(min=16, max=1000)]
Data = Annotated[
    list[str], typer.Option(help="demo, a JSONL file or a folder of them; can be repeated.")
]
Repetitions = Annotated[int, typer.Option(min=1)]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"], typer.Option(help="Data type of arithmetic and KV.")
]
Engine = Annotated[
    Literal["auto", "openvino", "static", "torch"],
    typer.Option(help="What executes the forward passes."),
]
Output = Annotated[Path, typer.Option(help="Folder for the results.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show stack traces.")]


def check_models(**models: str) -> None:
    """Refuse wrong and damaged models, by their flags, before anything is loaded.

    A model on the hub is not looked up.

    Raises:
        ModelNotFoundError: a folder is not a model.
        typer.BadParameter: a model cannot run.
    """
    for name, model in models.items():
        check_name(f"--{name}", model)
        folder = local_folder(model)
        if folder is not None and (problem := problem_of(folder)):
            raise typer.BadParameter(f"--{name} {problem}")


def check_factors(widen_target: int, widen_draft: int) -> None:
    """Check factors of widths.

    Raises:
        typer.BadParameter: a factor is not offered.
    """
    for flag, factor in (("--widen-target", widen_target), ("--widen-draft", widen_draft)):
        if factor not in demo.FACTORS:
            allowed = ", ".join(map(str, demo.FACTORS))
            raise typer.BadParameter(f"{flag} {factor}: choose one of {allowed}")


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make a folder for results, and keep other runs out of it during the block.

    The end of a process, also a kill, ends its lock.

    Raises:
        SettingsError: the folder cannot be written, or another run writes to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"--output: {folder} cannot be written ({error.strerror}): choose another folder"
        ) from None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"--output: another run writes to {folder}: choose another folder, or wait for it"
            ) from None
        except OSError:
            err.print(f"{folder} cannot be locked: let no other run write to it")
        yield
    finally:
        os.close(descriptor)


_NAMES = {int: "whole numbers", float: "numbers"}


def numbers(text: str, flag: str, kind: type[N], lowest: N, highest: N) -> tuple[N, ...]:
    """Convert a list like ``1,8``; a number that is repeated counts once.

    Raises:
        typer.BadParameter: the text is not a list of numbers, or a number is out of bounds.
    """
    try:
        parsed = [kind(number) for number in text.split(",")]
    except ValueError:
        parsed = []
    if not parsed or not all(lowest <= number <= highest for number in parsed):
        raise typer.BadParameter(
            f"{flag} {text!r}: must be {_NAMES[kind]}, separated by commas, each in "
            f"{lowest:g}..{highest:g}"
        )
    return tuple(dict.fromkeys(parsed))


def words(text: str, flag: str, known: Iterable[str]) -> list[str]:
    """Convert a list like ``none,draft``; a word that is repeated counts once.

    Raises:
        typer.BadParameter: a word is not known.
    """
    found = text.split(",")
    if not set(found) <= set(known):
        raise typer.BadParameter(f"{flag} {text!r}: choose of {', '.join(known)}")
    return list(dict.fromkeys(found))


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
    return widen(folder, factor, scratch)


def run_plan(plan: BenchmarkRun) -> Results:
    """Measure a plan with a progress bar."""
    return with_progress(plan.num_batches, lambda advance: run(plan, advance))


def with_progress(
    total: int, measure: Callable[[Callable[[], None]], Coroutine[Any, Any, Measured]]
) -> Measured:
    """Measure with progress, which ``measure`` advances after each of ``total`` batches."""
    with progress(err, "batches", total, note="starting the processes") as advance:
        return asyncio.run(measure(lambda: advance(1, "")))


def plots() -> ModuleType:
    """Return the module that draws plots, before anything is measured.

    Raises:
        SetupError: matplotlib is not installed.
    """
    try:
        return import_module("ssd_bench.plots")
    except ModuleNotFoundError as error:
        raise SetupError(
            "the plot needs matplotlib, which is not installed: run 'make setup', or "
            "pip install 'ssd-serving[bench]'"
        ) from error


def print_json(value: Any) -> None:
    """Print a JSON value, indented. A console would add escape sequences with ``FORCE_COLOR``."""
    out.file.write(json.dumps(value, indent=2) + "\n")
    out.file.flush()


def show_results(file: Path, table: str, *, is_json: bool) -> None:
    """Print results that a JSON file contains; a table and the plot are beside it."""
    if is_json:
        print_json(json.loads(file.read_text()))
        return
    out.print(table, soft_wrap=True)
    err.print(f"written to {file}, {file.stem}.md, {file.stem}.png, {file.stem}.pdf")
