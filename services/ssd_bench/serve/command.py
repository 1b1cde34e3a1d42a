"""``ssd bench serve``: options, and the run of loads and scenarios."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from ssd.console import make_console
from ssd.errors import SSDError
from ssd.launch import Deployment
from ssd.model_name import local_folder
from ssd.rpc.credentials import ClientCredentials, TlsFiles
from ssd.types import Mode
from ssd_bench.drawing import plots
from ssd_bench.serve.figures import load_figures
from ssd_bench.serve.memory import recorded_memory
from ssd_bench.serve.report import records, tables
from ssd_bench.serve.scenarios import (
    SCENARIOS,
    WARM_UP_SECONDS,
    LoadOptions,
    Scenario,
    ScenarioResult,
)
from ssd_bench.serve.served_target import ServedTarget, connected, started

out = make_console(soft_wrap=False)
err = make_console(stderr=True)
MAX_NUM_SEQS = 256
LOAD_SECONDS = 30.0
"""Duration of a load without a scenario."""
Reach = Callable[[], AbstractAsyncContextManager[ServedTarget]]
"""Connects to a target that runs already."""


class FailedChecksError(SSDError):
    """A check that does not depend on the machine has failed."""


def serve(
    *,
    scenario: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(SCENARIOS)}, by commas, or all; default: one load."),
    ] = None,
    streams: Annotated[
        int, typer.Option(min=1, max=4096, help="Clients that each have one request open.")
    ] = 16,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests per second, whether or not others have ended."),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds of the load; default: 30, or those of the scenario."),
    ] = None,
    mode: Annotated[
        Literal["auto", "autoregressive", "speculative"], typer.Option(help="How rounds run.")
    ] = "auto",
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Maximum number of new tokens of a request.")
    ] = 128,
    address: Annotated[
        str | None, typer.Option(help="gRPC address of a running target; default: start one.")
    ] = None,
    http_address: Annotated[
        str, typer.Option(help="With --address: its HTTP address, for metrics.")
    ] = "",
    tls_ca: Annotated[
        str,
        typer.Option(envvar="SSD_TLS_CA", help="With --address: PEM file of the target's CA."),
    ] = "",
    tls_certificate: Annotated[
        str, typer.Option(envvar="SSD_TLS_CERTIFICATE", help="With --tls-ca: your certificate.")
    ] = "",
    tls_key: Annotated[str, typer.Option(envvar="SSD_TLS_KEY", help="Its key.")] = "",
    token_file: Annotated[
        str, typer.Option(envvar="SSD_TOKEN_FILE", help="With --address: file with your token.")
    ] = "",
    allow_insecure: Annotated[
        bool,
        typer.Option(help="With --token-file: send it to another machine in plain text."),
    ] = False,
    target: Annotated[str, typer.Option(help="Model folder or demo://target.")] = "demo://target",
    draft: Annotated[str, typer.Option(help="Model folder or demo://draft.")] = "demo://draft",
    num_drafts: Annotated[int, typer.Option(min=0, max=16)] = 1,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_NUM_SEQS, help="Of the target to start; default: --streams."),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw serve.png; needs matplotlib.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
    is_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces.")] = False,
) -> None:
    """Send requests over gRPC and measure what clients see; write serve.json.

    Exit code 1 if a request failed, something was not freed or memory grew. Times fail nothing.
    """
    del debug
    options = LoadOptions(
        mode=Mode(mode),
        temperature=temperature,
        max_tokens=max_tokens,
        duration_seconds=duration,
    )
    if http_address and address is None:
        raise typer.BadParameter("--http-address belongs to --address")
    for model in (target, draft):
        local_folder(model)
    slots = max_num_seqs or min(streams, MAX_NUM_SEQS)
    chosen = _chosen(scenario) or {"load": _one_load(streams, rate, slots)}
    reach = None
    if address is not None:
        tls = TlsFiles(certificate=tls_certificate, key=tls_key, ca=tls_ca)
        credentials = ClientCredentials(
            tls if tls.paths else None, token_file, allow_insecure=allow_insecure
        )
        reach = partial(connected, address, http_address, credentials)
    drawing = plots() if plot else None
    deployment = Deployment(target=target, draft=draft, num_drafts=num_drafts)
    results = []
    for name, each in chosen.items():
        of_load = f"{_label(streams, rate)} for {options.seconds(LOAD_SECONDS):g} s"
        err.print(f"{name}: {(each.run.__doc__ or of_load).splitlines()[0]}")
        results.append(asyncio.run(_run(each, options, reach, deployment)))
        if not is_json:
            for table in tables(results[-1]):
                out.print(table)
    found = [records(each) for each in results]
    output.mkdir(parents=True, exist_ok=True)
    (output / "serve.json").write_text(json.dumps(found, indent=1))
    if drawing is not None:
        drawing.draw_loads(results, output / "serve.png")
    if is_json:
        out.print_json(json.dumps(found))
    err.print(f"written to {output}/serve.json{' and serve.png' if plot else ''}")
    failed = [
        f"{each.name}: {check.name}"
        for each in results
        for check in each.checks
        if not check.is_met and not check.is_timing
    ]
    if failed:
        raise FailedChecksError(f"{len(failed)} checks failed: {'; '.join(failed)}")


def _chosen(names: str | None) -> dict[str, Scenario]:
    """Return the scenarios of the command line; none if there is no option.

    Raises:
        typer.BadParameter: there is no such scenario.
    """
    if names is None:
        return {}
    if names == "all":
        return SCENARIOS
    unknown = set(names.split(",")) - set(SCENARIOS)
    if unknown:
        raise typer.BadParameter(f"--scenario: choose from {', '.join(SCENARIOS)}, or all")
    return {name: SCENARIOS[name] for name in names.split(",")}


def _label(streams: int, rate: float | None) -> str:
    return f"{streams} streams" if rate is None else f"{rate:g} requests/s"


def _one_load(streams: int, rate: float | None, max_num_seqs: int) -> Scenario:
    """Return a scenario of one load without a question."""

    async def run(served: ServedTarget, options: LoadOptions) -> ScenarioResult:
        result = ScenarioResult("load")
        seconds = options.seconds(LOAD_SECONDS)
        generator, workload = served.generator, options.workload()
        async with recorded_memory(served.pids, served.clock) as log:
            if rate is None:
                load = await generator.closed_loop(
                    workload,
                    streams=streams,
                    seconds=seconds,
                    warm_up_seconds=WARM_UP_SECONDS,
                )
            else:
                load = await generator.open_loop(
                    workload, rate=rate, seconds=seconds, warm_up_seconds=WARM_UP_SECONDS
                )
        result.loads[_label(streams, rate)] = load_figures(load)
        result.memory = log.figures()
        result.series.append((load, log))
        return result

    return Scenario(run=run, max_num_seqs=max_num_seqs)


async def _run(
    scenario: Scenario,
    options: LoadOptions,
    reach: Reach | None,
    deployment: Deployment,
) -> ScenarioResult:
    async with _served(scenario, reach, deployment) as served:
        return await scenario.run(served, options)


@asynccontextmanager
async def _served(
    scenario: Scenario, reach: Reach | None, deployment: Deployment
) -> AsyncIterator[ServedTarget]:
    """Return a running target, or one that is started with the scenario's limits."""
    if reach is not None:
        async with reach() as served:
            yield served
        return
    limits = ("--max-num-seqs", str(scenario.max_num_seqs), "--max-queue", str(scenario.max_queue))
    sessions = ("--max-sessions", str(scenario.max_num_seqs))
    own = replace(deployment, target_flags=limits, draft_flags=sessions)
    async with started(own) as served:
        yield served
