"""``python -m ssd_distill``: flags, and the figures as a table or JSON."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ssd.console import run_app
from ssd.model_files.model_name import check_name
from ssd_cli.display import err, out, plain_table, print_table, status, write
from ssd_distill.run_folder import is_complete, read_record

NEW_RATE, FURTHER_RATE = 2e-3, 1e-4
"""Peak learning rates of AdamW for random weights, and for those of a trained draft."""


def command(
    *,
    target: Annotated[str, typer.Option(help="Model folder, demo://target or hf://…")],
    data: Annotated[
        list[str],
        typer.Option(
            help="File or folder of text or of .jsonl with a field text or prompt, or "
            "demo://corpus: the source of Python's standard library. Can be repeated."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the trained draft.")],
    draft: Annotated[
        str, typer.Option(help="Draft to train further; without it, give --layers and --hidden.")
    ] = "",
    layers: Annotated[int, typer.Option(min=0, help="Layers of a new draft.")] = 0,
    hidden: Annotated[int, typer.Option(min=0, help="Width of a new draft.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 700,
    batch: Annotated[int, typer.Option(min=2, help="Sequences of a step.")] = 16,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a sequence.")] = 256,
    windows: Annotated[
        int,
        typer.Option(min=0, help="Sequences that the target writes first, for half of each batch."),
    ] = 512,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0, help=f"Peak learning rate; default: {FURTHER_RATE:g}, {NEW_RATE:g} if new."
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of the figures, for each temperature.")
    ] = 200,
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, help="Of order, noise and new weights.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    checkpoint_minutes: Annotated[
        float, typer.Option(min=0, help="Time between checkpoints; Ctrl-C writes one too.")
    ] = 5.0,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces.")] = False,
) -> None:
    """Train a draft to make the choices of its target.

    The same command goes on with a run that was interrupted.
    """
    del debug
    is_new = not draft
    if is_new != bool(layers and hidden) or is_new != bool(layers or hidden):
        raise typer.BadParameter("give either --draft, or --layers and --hidden of a new one")
    check_name("--target", target)
    if draft:
        check_name("--draft", draft)
    with status("loading"):
        # torch and transformers, which take seconds.
        from ssd_distill.distillation import Distillation, distill  # noqa: PLC0415
        from ssd_distill.training import Recipe  # noqa: PLC0415
    if rate is None:
        rate = NEW_RATE if is_new else FURTHER_RATE
    recipe = Recipe(
        num_steps=steps,
        batch_size=batch,
        length=length,
        adam_rate=rate,
        # Muon learns faster from random weights, and harms weights that AdamW has trained.
        muon_rate=2 * rate if is_new else 0.0,
        weight_decay=0.02,
        warmup_steps=max(1, min(30, steps // 10)),
    )
    plan = Distillation(
        target=target,
        draft=draft,
        num_layers=layers,
        width=hidden,
        data=tuple(data),
        recipe=recipe,
        windows=windows,
        rounds=rounds,
        seed=seed,
    )
    was_complete = is_complete(read_record(output))
    record = distill(plan, output, device=device, checkpoint_seconds=60 * checkpoint_minutes)
    if is_json:
        write(json.dumps({"output": str(output)} | record) + "\n")
        return
    print_table(out, figures_table(record["before"], record["after"]))
    done = f"{output} was already complete" if was_complete else f"written to {output}"
    err.print(f"{done}; try: ssd generate --target {target} --draft {output} TEXT")


def figures_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    """Return a table of two evaluations of held-out text."""
    table = plain_table("held-out text", right=("before", "after"))
    for row in zip(_rows(before), _rows(after), strict=True):
        table.add_row(row[0][0], row[0][1], row[1][1])
    return table


def _rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for temperature, tokens in figures["tokens_per_round"].items():
        yield f"tokens per round, T = {temperature}", f"{tokens:.2f}"
        yield f"hit rate, T = {temperature}", f"{figures['hit_rate'][temperature]:.0%}"
    yield "same greedy choice", f"{figures['agreement']:.0%}"
    yield "KL, nats per token", f"{figures['kl']:.3f}"


def main(argv: Sequence[str] | None = None, prog_name: str = "python -m ssd_distill") -> int:
    """Run a command line; return its exit code. The arguments are those of ``run_app``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return run_app(app, argv, prog_name)


if __name__ == "__main__":
    sys.exit(main())
