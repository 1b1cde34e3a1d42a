"""``ssd bench sampling``: the command."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ssd.console import progress
from ssd.demo.corpus import held_out_prompts
from ssd.errors import SettingsError
from ssd.model_files.model_source import resolve
from ssd.speculation.fan_out import FanOutPolicy, Split, make_policy, uniform_share
from ssd.speculation.fan_out_fit import FanOutFit
from ssd.text.tokenizer import load_tokenizer
from ssd_bench.command import (
    Debug,
    Draft,
    Lookahead,
    Output,
    Target,
    check_models,
    err,
    numbers,
    only_writer,
    plots,
    show_results,
)
from ssd_bench.report import markdown_table
from ssd_bench.sampling.laws import Coupled, Law, Saguaro
from ssd_bench.sampling.rounds import FITTED, Cell, Experiment

_COLUMNS = ("adaptive", FITTED, "geometric", "uniform", "explicit")
PROMPT_TOKENS = 64
PROMPT_CHARS = 1200
ROUNDS_OF_A_TEXT = 30


def sampling(
    *,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0,0.6,1",
    cache_weights: Annotated[
        str, typer.Option(help="C of Saguaro sampling; 1 is rejection sampling.")
    ] = "1,0.75,0.5,0.25,0",
    lookahead: Lookahead = 6,
    branches: Annotated[int, typer.Option(min=1, max=256, help="N of a table.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Of each law and temperature.")] = 300,
    proposal_share: Annotated[
        float, typer.Option(min=0, help="Time of a proposal after a miss, in verifies.")
    ] = 0.5,
    output: Output = Path("results/sampling"),
    is_json: Annotated[bool, typer.Option("--json", help="Print sampling.json.")] = False,
    debug: Debug = False,  # noqa: ARG001 - read by ``run_app``
) -> None:
    """Compare laws of sampling on a pair; write sampling.json, sampling.md and a plot."""
    cells = _cells(
        numbers(temperatures, "--temperatures", float, 0, 2),
        numbers(cache_weights, "--cache-weights", float, 0, 1),
    )
    check_models(target=target, draft=draft)
    drawing = plots()
    with only_writer(output):
        # torch is slow to import.
        from ssd_bench.sampling.model import Model, load_model  # noqa: PLC0415

        folders = [resolve(source) for source in (target, draft)]
        tokenizer, other = map(load_tokenizer, folders)
        if other.fingerprint != tokenizer.fingerprint:
            raise SettingsError(f"--draft {draft} has another tokenizer than --target {target}")
        num_texts = -(-rounds // ROUNDS_OF_A_TEXT)
        texts = held_out_prompts(num_texts, num_chars=PROMPT_CHARS)
        prompts = [list(tokenizer.encode(text))[:PROMPT_TOKENS] for text in texts]
        if len(prompts) < num_texts:
            raise SettingsError(f"--rounds {rounds}: there are prompts for fewer")
        models = [load_model(folder) for folder in folders]
        # Embeddings of one tokenizer can have different padding.
        num_ids = min(tokenizer.vocab_size, *(model.config.vocab_size for model in models))
        with progress(err, "rounds", len(cells) * rounds) as advance:
            experiment = Experiment(
                pair=(Model(models[0], num_ids), Model(models[1], num_ids)),
                policies=policies(lookahead, branches),
                lookahead=lookahead,
                branches=branches,
                on_round=lambda: advance(1),
            )
            for cell in cells:
                advance(0, f"T = {cell.temperature:g}, {cell.law}")
                fit = FanOutFit(branches)
                for index, prompt in enumerate(prompts):
                    law = _law(cell, index, branches // (lookahead + 1))
                    num_rounds = min(ROUNDS_OF_A_TEXT, rounds - cell.rounds)
                    experiment.add_rounds(cell, law, prompt, num_rounds, fit)
        table = markdown(cells, proposal_share)
        (output / "sampling.md").write_text(table, encoding="utf-8")
        file = output / "sampling.json"
        file.write_text(json.dumps([asdict(cell) for cell in cells]))
        drawing.draw_sampling(cells, output / "sampling.png", proposal_share)
        show_results(file, table, is_json=is_json)


def policies(lookahead: int, branches: int) -> dict[str, FanOutPolicy]:
    """Return the policies of the table but ``FITTED``. Explicit is N/2, N/4, and equal shares."""
    first = (branches // 2, branches // 4)
    rest = uniform_share(max(lookahead - 2, 0), branches - sum(first))
    plain = {name: make_policy(name) for name in ("adaptive", "geometric", "uniform")}
    return {**plain, "explicit": Split(partial(explicit_share, (*first, *rest)))}


def explicit_share(split: Sequence[int], num_proposed: int, num_branches: int) -> tuple[int, ...]:
    """Return F_0..F_m of a list F_0..F_K; F_m of a short proposal includes the shares after it."""
    short = tuple(split[:num_proposed])
    return (*short, max(num_branches - sum(short), 0))


def markdown(cells: Sequence[Cell], proposal_share: float) -> str:
    """Return the table: hit rates with 95 % intervals, and speed-ups with ``own_policy``."""
    titles = ("T", "law", "C", "tokens per round", *(f"hit, {name}" for name in _COLUMNS))
    titles += ("speed-up", "speed-up, miss waits")
    rows = []
    for cell in cells:
        weight = "" if cell.cache_weight is None else f"{cell.cache_weight:g}"
        values = [f"{cell.temperature:g}", cell.law, weight, f"{cell.tokens_per_round:.2f}"]
        for name in _COLUMNS:
            low, high = cell.hit_interval(name)
            values.append(f"{cell.hit_rate(name):.2f} ({low:.2f}–{high:.2f})")
        values += [
            f"{cell.speed_up(proposal_share, waits_after_miss=waits):.2f}"
            for waits in (False, True)
        ]
        rows.append(values)
    return "\n".join(markdown_table(titles, rows)) + "\n"


def _cells(temperatures: Sequence[float], cache_weights: Sequence[float]) -> list[Cell]:
    """Return the cells; at temperature 0, all laws are the same."""
    cells: list[Cell] = []
    for temperature in temperatures:
        cells.append(Cell(temperature, "coupled"))
        if temperature > 0:
            cells += [
                Cell(temperature, "rejection" if weight == 1 else "Saguaro", weight)
                for weight in cache_weights
            ]
    return cells


def _law(cell: Cell, seed: int, cache_size: int) -> Law:
    if cell.cache_weight is None:
        return Coupled(cell.temperature, seed)
    rng = np.random.default_rng(seed)
    return Saguaro(cell.temperature, rng, cell.cache_weight, cache_size)
