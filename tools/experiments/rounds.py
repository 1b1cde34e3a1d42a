"""``rounds``: where a round spends its time, also with larger vocabularies."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from ssd.demo.corpus import held_out_prompts
from ssd.demo.widen import copy_companions
from ssd.engine.config import ModelConfig, read_config
from ssd.errors import SetupError
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
from ssd_bench.plots import draw_rounds
from ssd_bench.prompts import DEMO
from ssd_bench.report import round_records, rounds_markdown
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
    """Measure where a round spends its time; write rounds.json, rounds.md and a plot."""
    check_models(target=target, draft=draft)
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
            prompts={DEMO: held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS)},
            batches=tuple(int(number) for number in numbers(batch, "--batch", float, 1, MAX_BATCH)),
            temperatures=numbers(temperature, "--temperature", float, 0, 2),
            max_tokens=max_tokens,
            repetitions=repetitions,
            needs_hits=False,
            modes=chosen,
        )
        records = round_records(run_plan(plan).cells)
    table = "\n".join(rounds_markdown(records))
    output.mkdir(parents=True, exist_ok=True)
    (output / "rounds.json").write_text(json.dumps({"name": name, "rounds": records}, indent=1))
    (output / "rounds.md").write_text(table + "\n", encoding="utf-8")
    runs = {run["name"]: run["rounds"] for run in earlier} | {name: records}
    draw_rounds(runs, output / "rounds.png")
    out.print(table, soft_wrap=True)
    err.print(f"written to {output}/rounds.json, rounds.md, rounds.png and rounds.pdf")


def padded(model: str, vocabulary: int, scratch: Path) -> Path:
    """Return the folder of a model, or of one made in ``scratch`` with a larger vocabulary.

    The new ids are never chosen, because the tokenizer does not have them. Passes, sampling and
    noise cost as much as with a vocabulary of this size.

    Raises:
        SetupError: the model cannot be found or padded.
    """
    folder = resolve(model)
    if not vocabulary:
        return folder
    err.print(f"padding the vocabulary of {model} to {vocabulary} ids")
    num_ids = ModelConfig.from_folder(folder).vocab_size
    missing = vocabulary - num_ids
    if missing < 0:
        raise SetupError(f"{folder} has {num_ids} token ids, more than {vocabulary}")
    output = scratch / f"{folder.name}-{vocabulary}"
    output.mkdir()
    tensors = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SetupError(f"{folder} has no *.safetensors")
    for file in files:
        for name, tensor in load_file(file).items():
            of_ids = name.rpartition(".")[0].rpartition(".")[2] in {"embed_tokens", "lm_head"}
            tensors[name] = pad(tensor, (0, 0, 0, missing)) if of_ids else tensor
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = read_config(folder) | {"vocab_size": vocabulary}
    (output / "config.json").write_text(json.dumps(config))
    copy_companions(folder, output)
    return output
