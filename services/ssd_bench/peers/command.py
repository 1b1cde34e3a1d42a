"""``ssd bench peers``: the command."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ssd.console import progress
from ssd.errors import SettingsError
from ssd.model_files.model_source import resolve
from ssd.runtime.cpu_plan import one_cpu_a_core
from ssd.text.tokenizer import load_tokenizer
from ssd_bench.command import (
    MAX_BATCH,
    Data,
    Debug,
    Draft,
    Target,
    check_models,
    err,
    numbers,
    only_writer,
    plots,
    show_results,
    words,
)
from ssd_bench.identity import identity
from ssd_bench.machine import machine
from ssd_bench.peers.contenders import OWN, PAPER, PEERS, Dtype, contenders, server
from ssd_bench.peers.engines import Setup
from ssd_bench.peers.environments import REQUIREMENTS, environments_folder
from ssd_bench.peers.measure import Case, Row, measure, num_steps
from ssd_bench.peers.report import METHODS, ResultsFile, markdown
from ssd_bench.peers.workers.wire import Batch
from ssd_bench.prompts import DEMO, data_sets, read_texts

PROMPT_CHARS = 1200
ON_CPUS = ",".join(name for name, peer in PEERS.items() if not peer.needs_cuda)
NO_SETTINGS = ("environments", "output", "is_json", "debug")
"""Flags that a run may change when it goes on."""


def peers(
    *,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    names: Annotated[
        str,
        typer.Option(
            "--peers", help="Engines, and NAME=URL of servers that run already, by commas."
        ),
    ] = ON_CPUS,
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16, int8, int4.")] = "float32",
    methods: Annotated[str, typer.Option(help="none, draft, ngram, ssd.")] = ",".join(METHODS),
    lookaheads: Annotated[str, typer.Option(help="K of drafts on the target's CPUs.")] = "3,5",
    ssd_lookahead: Annotated[int, typer.Option(min=1, max=16, help="K of SSD.")] = 6,
    threads: Annotated[str, typer.Option(help="CPUs of a target.")] = "1,2",
    batches: Annotated[str, typer.Option(help="Prompts at a time.")] = "1",
    temperatures: Annotated[str, typer.Option(help="Each with each of --batches.")] = "0",
    data: Data = [DEMO],  # noqa: B006 - typer copies it
    prompt_tokens: Annotated[
        int, typer.Option(min=8, max=512, help="Most tokens of a prompt; the demo's have as many.")
    ] = 96,
    max_tokens: Annotated[int, typer.Option(min=16, max=448)] = 160,
    repetitions: Annotated[int, typer.Option(min=1, help="Batches, each in turn.")] = 7,
    environments: Annotated[
        Path | None, typer.Option(help="Folder of the engines' environments; they are built once.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for the results; a run that was ended goes on there.")
    ] = Path("results/peers"),
    is_json: Annotated[bool, typer.Option("--json", help="Print peers.json.")] = False,
    debug: Debug = False,
) -> None:
    """Measure this product beside other engines; write peers.json, peers.md and a plot."""
    settings = {name: str(value) for name, value in locals().items() if name not in NO_SETTINGS}
    sets = data_sets(data)
    cases = [
        Case(batch, temperature, name)
        for name in sets
        for temperature in numbers(temperatures, "--temperatures", float, 0, 2)
        for batch in numbers(batches, "--batches", int, 1, MAX_BATCH)
    ]
    chosen, servers = _engines(names)
    drawing = plots()
    cpus = one_cpu_a_core(os.sched_getaffinity(0))
    offered = contenders(
        chosen,
        dtypes=words(dtypes, "--dtypes", get_args(Dtype)),
        lookaheads=numbers(lookaheads, "--lookaheads", int, 1, 16),
        threads=numbers(threads, "--threads", int, 1, len(cpus)),
        ssd_lookahead=ssd_lookahead,
    )
    draftings = (*words(methods, "--methods", METHODS), "server")
    rows = [
        Row(contender, case)
        for case in cases
        for contender in (*offered, *map(server, servers))
        if contender.drafting in draftings
        and (contender.drafting != "draft" or case.batch <= PEERS[contender.peer].drafting_batch)
    ]
    if not rows:
        raise typer.BadParameter(f"{names} offers none of {methods} with {dtypes}")
    most = max(row.contender.threads + (row.contender.drafting == "ssd") for row in rows)
    if most > len(cpus):
        raise SettingsError(f"the contenders need {most} CPUs, this process may use {len(cpus)}")
    _check_models(target, draft, rows)
    with only_writer(output):
        cache = environments or environments_folder()
        setup = Setup(
            target=resolve(target),
            draft=resolve(draft),
            cpus=cpus,
            batch=max(case.batch for case in cases),
            environments=cache,
            scratch=cache / "scratch",
            servers=servers,
        )
        asked = {
            case: batches
            for name, path in sets.items()
            for case, batches in _batches(
                [of_set for of_set in cases if of_set.data == name],
                path,
                load_tokenizer(setup.target).encode,
                (repetitions, prompt_tokens, max_tokens),
            ).items()
        }
        setup.scratch.mkdir(parents=True, exist_ok=True)
        results = ResultsFile(output / "peers.json", _run(settings, chosen, setup, asked))
        rows = results.continued(rows)
        if not num_steps(rows, asked):
            err.print(f"{results.path} has all measurements: nothing is left to measure")
        try:
            with progress(err, "steps", num_steps(rows, asked)) as advance:

                def on_step(what: str) -> None:
                    advance(1, what)
                    results.save(rows)

                asyncio.run(measure(rows, setup, asked, on_step))
        finally:
            results.save(rows)
        conditions = (
            f"{machine()}; up to {prompt_tokens} + {max_tokens} tokens; medians (quartiles) of "
            f"{repetitions} batches in turn, whole requests."
        )
        table = markdown(rows, conditions, load_tokenizer(setup.target).decode)
        (output / "peers.md").write_text(table, encoding="utf-8")
        drawing.draw_peers(rows, output / "peers.png")
        show_results(results.path, table, is_json=is_json)


def _check_models(target: str, draft: str, rows: Sequence[Row]) -> None:
    """Refuse the models that this product would run and cannot.

    Other engines run families that it does not support.
    """
    all_of_run = {row.contender for row in rows}
    own = {each for each in all_of_run if each.peer in OWN}
    if own:
        check_models(target=target)
    # Beside another engine, only the draft is of this product.
    if any(each.drafting != "none" for each in own) or any(
        each.drafting == "ssd" and each.peer != PAPER for each in all_of_run
    ):
        check_models(draft=draft)


def _engines(names: str) -> tuple[list[str], dict[str, str]]:
    """Return the engines of ``--peers``, and the URLs of its servers by their names."""
    chosen = list(dict.fromkeys(entry for entry in names.split(",") if "=" not in entry))
    servers = dict(entry.split("=", 1) for entry in names.split(",") if "=" in entry)
    if not set(chosen) <= set(PEERS):
        raise typer.BadParameter(f"--peers {names!r}: choose of {', '.join(PEERS)}, or NAME=URL")
    for name, url in servers.items():
        if not name or name in PEERS or not url.startswith(("http://", "https://")):
            raise typer.BadParameter(
                f"--peers {name}={url}: must be a name of its own and a URL, for example "
                "sglang=http://127.0.0.1:30000"
            )
    return chosen, servers


def _run(
    settings: Mapping[str, str],
    engines: Sequence[str],
    setup: Setup,
    batches: Mapping[Case, Sequence[Batch]],
) -> dict[str, Any]:
    """Return what was measured, and where: only a run with the same identity may go on."""
    # The other engines are in the environment of this command, whose versions the identity has.
    versions = {peer: " ".join(REQUIREMENTS[peer]) for peer in engines if peer in REQUIREMENTS}
    prompts = {f"{case}": own for case, own in batches.items()}
    return {
        "identity": identity({**settings, **versions}, prompts, (setup.target, setup.draft)),
        "settings": settings,
        "engines": versions,
        "machine": machine(),
    }


def _batches(
    cases: Sequence[Case],
    file: Path | None,
    encode: Callable[[str], Sequence[int]],
    sizes: tuple[int, int, int],
) -> dict[Case, list[Batch]]:
    """Return one batch for each repetition, and one to warm up with, from one data set.

    No prompt occurs twice: engines keep what they have stored of earlier ones. The prompts of a
    batch are cut to the shortest of them, because some engines take prompts of one length.

    Args:
        cases: of the data set.
        file: of the data set; None: the demo.
        encode: of the target's tokenizer.
        sizes: repetitions, most tokens of a prompt, new tokens.
    """
    repetitions, prompt_tokens, max_tokens = sizes
    count = sum(case.batch for case in cases) * (1 + repetitions)
    texts = read_texts(file, count, num_chars=PROMPT_CHARS)
    prompts = [list(encode(text))[:prompt_tokens] for text in texts]
    if len(texts) < count or (file is None and set(map(len, prompts)) != {prompt_tokens}):
        raise SettingsError(
            f"{file or 'the demo'}: fewer than {count} prompts of this length, which --repetitions "
            f"{repetitions} and --prompt-tokens {prompt_tokens} need: choose smaller numbers"
        )
    left = iter(prompts)

    def batch(case: Case, repetition: int) -> Batch:
        own = list(islice(left, case.batch))
        length = min(map(len, own))
        return Batch(
            prompts=[prompt[:length] for prompt in own],
            max_tokens=max_tokens,
            temperature=case.temperature,
            seed=repetition * case.batch,
        )

    return {case: [batch(case, index) for index in range(1 + repetitions)] for case in cases}
