"""``rounds``: where a round spends its time, also with larger vocabularies."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ssd.demo.corpus import held_out_prompts
from ssd.demo.widen import pad_vocabulary
from ssd.model_files.model_source import resolve
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
    check_models,
    err,
    numbers,
    out,
    run_plan,
)
from ssd_bench.report import round_records, rounds_markdown
from ssd_bench.round_parts import PARTS
from ssd_bench.runs import MODES, BenchmarkRun


def rounds(
    *,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    vocabulary: Annotated[
        int, typer.Option(min=0, help="Pad both vocabularies to this many ids; 0: do not.")
    ] = 0,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    batch: Numbers = "1,8,16",
    temperature: Numbers = "0,1",
    modes: Annotated[str, typer.Option(help="ar, sd, ssd, separated by commas.")] = "ssd",
    max_tokens: MaxTokens = 64,
    repetitions: Repetitions = 3,
    dtype: Dtype = "auto",
    name: Annotated[str, typer.Option(help="Name of the bars in the plot.")] = "this version",
    compare: Annotated[
        list[Path] | None, typer.Option(help="rounds.json of another run, for the same plot.")
    ] = None,
    output: Output = Path("results"),
    debug: Debug = False,  # noqa: ARG001 - read by run_app
) -> None:
    """Measure where a round spends its time; write rounds.json, rounds.md and rounds.png."""
    check_models(target, draft, 1, 1)
    chosen = tuple(modes.split(","))
    if not set(chosen) <= set(MODES):
        raise typer.BadParameter(f"--modes {modes!r}: choose of {', '.join(MODES)}")
    earlier = [json.loads(path.read_text()) for path in compare or []]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [padded(model, vocabulary, Path(scratch)) for model in (target, draft)]
        flags = ("--lookahead", str(lookahead), "--branches", str(branches), "--dtype", dtype)
        plan = BenchmarkRun(
            deployment=Deployment(
                target=str(folders[0]),
                draft=str(folders[1]),
                common_flags=(*flags, *MAX_LENGTH),
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
        found = round_records(run_plan(plan).cells)
    table = "\n".join(rounds_markdown(found))
    output.mkdir(parents=True, exist_ok=True)
    (output / "rounds.json").write_text(json.dumps({"name": name, "rounds": found}, indent=1))
    (output / "rounds.md").write_text(table + "\n")
    draw({each["name"]: each["rounds"] for each in earlier} | {name: found}, output / "rounds.png")
    out.print(table, soft_wrap=True)
    err.print(f"written to {output}/rounds.json, rounds.md and rounds.png")


def padded(model: str, vocabulary: int, scratch: Path) -> Path:
    """Return the folder of a model, or of one made in ``scratch`` with a larger vocabulary.

    Raises:
        SetupError: the model cannot be found or padded.
    """
    folder = resolve(model)
    if not vocabulary:
        return folder
    err.print(f"padding the vocabulary of {model} to {vocabulary} ids")
    return pad_vocabulary(folder, vocabulary, scratch / f"{folder.name}-{vocabulary}")


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw the parts of a round as stacked bars: one bar for each run, side by side.

    Args:
        runs: the records of ``report.round_records``, by the name of the run.
        path: the file to write.
    """
    keys = list(dict.fromkeys(_key(each) for records in runs.values() for each in records))
    figure = Figure(figsize=(max(6.0, 1.2 * len(keys) * len(runs)), 6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(runs)
    colors = dict(zip(PARTS, TABLEAU_COLORS, strict=False))
    ticks: dict[float, str] = {}
    for shift, (name, records) in enumerate(runs.items()):
        for each in records:
            place = keys.index(_key(each)) + (shift - (len(runs) - 1) / 2) * width
            bottom = 0.0
            for part in PARTS:
                axes.bar(place, each["parts_ms"][part], width * 0.9, bottom, color=colors[part])
                bottom += each["parts_ms"][part]
            axes.annotate(f"{bottom:.3g}", (place, bottom), ha="center", va="bottom", fontsize=7)
            label = _key(each).replace(", ", "\n")
            ticks[place] = f"{name}\n{label}" if len(runs) > 1 else label
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7)
    axes.set_ylabel("milliseconds of a round")
    parts = PARTS[::-1]
    handles = [Patch(color=colors[part]) for part in parts]
    figure.legend(handles, parts, loc="outside right upper")
    figure.savefig(path, dpi=120)


def _key(record: Mapping[str, Any]) -> str:
    return f"{record['mode']}, batch {record['batch']}, T={record['temperature']:g}"
