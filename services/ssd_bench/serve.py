"""``ssd bench serve``: guidellm's load on a gateway, and what only this product can check.

guidellm sends the requests and measures what clients see; its report is beside ours. Here are the
processes, and the checks of each load: no request fails, texts are the same as before it, nothing
is held after it, no process grows. Times fail nothing, since they depend on the machine.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from ssd.demo.corpus import held_out_prompts
from ssd.errors import OverloadedError, SetupError, SSDError
from ssd.model_files.model_source import resolve
from ssd.observability.scrape import scrape
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.runtime.launch import Deployment, RunningDeployment, deployed
from ssd.tasks import beside
from ssd.types import SamplingParams, TokenId
from ssd_bench.command import (
    PROMPT_CHARS,
    Debug,
    Draft,
    Json,
    Output,
    Target,
    check_models,
    err,
    numbers,
    only_writer,
    out,
    plots,
    print_json,
    words,
)
from ssd_bench.loads import LATENCIES, PERCENTILES, Load, LoadResult
from ssd_bench.peers.engines import kill_session
from ssd_bench.peers.environments import environments_folder, interpreter
from ssd_bench.resources import MIB, recorded

SLOTS = 64
"""Sequences of the target, and requests of its queue."""
OVERLOAD = 10
"""The rate of ``overload``: this many times the requests that ended in ``streams``."""
NUM_TEXTS = 4
TEXT_TOKENS = 48
SETTLE_SECONDS = 15.0
"""Maximum time after a load in which everything is freed."""
END_SECONDS = 240.0
"""Maximum time of guidellm beyond its load: its imports, its prompts and its report."""
_POLL_SECONDS = 0.1
_REFUSALS = 'ssd_requests_total{outcome="overloaded"}'
_OF_TARGET = (
    *("ssd_running_sequences", "ssd_waiting_sequences", "ssd_open_sessions"),
    'ssd_kv_blocks{state="used"}',
)
_OF_DRAFT = ("ssd_draft_sessions",)


class FailedChecksError(SSDError):
    """A check has failed."""


LOADS = {
    "streams": Load(streams=SLOTS, prompt_tokens=128, output_tokens=128),
    "prompts": Load(streams=8, prompt_tokens=1_900, output_tokens=16),
    "overload": Load(prompt_tokens=128, output_tokens=64, is_overload=True),
    "poisson": Load(prompt_tokens=128, output_tokens=64),
}
"""Loads by their names on the command line."""


def serve(
    *,
    loads: Annotated[str, typer.Option(help=f"{', '.join(LOADS)}, by commas.")] = "streams",
    streams: Annotated[
        int, typer.Option(min=1, max=SLOTS, help="Clients of the load streams.")
    ] = SLOTS,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help=f"Requests/s of overload; default: {OVERLOAD}x of streams."),
    ] = None,
    rates: Annotated[
        str, typer.Option(help="Requests/s of the load poisson, each a load; draws serve.png.")
    ] = "0.5,1,2,4",
    seconds: Annotated[float, typer.Option(min=1, help="Duration of each load.")] = 60.0,
    mode: Annotated[
        Literal["auto", "autoregressive", "speculative"], typer.Option(help="How rounds run.")
    ] = "auto",
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    num_drafts: Annotated[int, typer.Option(min=0, max=16)] = 1,
    environments: Annotated[
        Path | None, typer.Option(help="Folder of guidellm's environment, which is built once.")
    ] = None,
    output: Output = Path("results"),
    is_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - read by ``run_app``
) -> None:
    """Send load to a gateway with guidellm; check texts and leaks; write serve.json.

    Exit code 1 if a request failed, a text changed, something was not freed or a process grew.
    """
    names = words(loads, "--loads", LOADS)
    if "overload" in names and rate is None and "streams" not in names[: names.index("overload")]:
        raise typer.BadParameter("--loads overload: give its --rate, or the load streams before it")
    check_models(target=target, **({"draft": draft} if num_drafts else {}))
    model = resolve(target)
    with only_writer(output):
        folder = environments or environments_folder()
        guidellm = interpreter("guidellm", folder).with_name("guidellm")
        deployment = Deployment(
            target=target,
            draft=draft,
            num_drafts=num_drafts,
            gateway_port=0,
            target_flags=("--max-num-seqs", str(SLOTS), "--max-queue", str(SLOTS)),
            draft_flags=("--max-sessions", str(SLOTS)),
        )
        drawing = plots() if "poisson" in names else None
        chosen = {name: LOADS[name] for name in names if name != "poisson"}
        if "poisson" in names:
            sweep = numbers(rates, "--rates", float, 0.001, 1000)
            chosen |= {
                f"poisson-{swept:g}": replace(LOADS["poisson"], rate=swept) for swept in sweep
            }
        if "streams" in chosen:
            chosen["streams"] = replace(LOADS["streams"], streams=streams)
        client = Client(guidellm, model, output, seconds, temperature, mode)
        for name in ("serve.json", "serve.png", "serve.pdf"):
            (output / name).unlink(missing_ok=True)
        results = asyncio.run(_run(chosen, deployment, client, rate))
        if drawing is not None:
            drawing.draw_latency(results, output / "serve.png")
        if is_json:
            print_json([asdict(result) for result in results])
        else:
            out.print(table(results))
        err.print(f"written to {output}/serve.json; guidellm's reports are beside it")
        failed = [f"{result.load}: {problem}" for result in results for problem in result.problems]
        if failed:
            raise FailedChecksError(f"{len(failed)} checks failed: {'; '.join(failed)}")


@dataclass(frozen=True, slots=True)
class Client:
    """guidellm: its program, its tokenizer, the folder of its reports, and what all loads share."""

    program: Path
    model: Path
    output: Path
    seconds: float
    """Duration of each load."""
    temperature: float
    mode: str

    def spec(self, load: Load, url: str, rate: float) -> dict[str, Any]:
        """Return the configuration of a load."""
        poisson = {"kind": "poisson", "rate": [rate]}
        concurrent = {"kind": "concurrent", "streams": [load.streams]}
        body = {"temperature": self.temperature, "mode": self.mode}
        data = {
            "kind": "synthetic_text",
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
        }
        return {
            "backend": {"kind": "openai_http", "target": url, "extras": {"body": body}},
            "profile": concurrent if load.streams else poisson,
            "constraints": [{"kind": "max_duration", "seconds": self.seconds}],
            "tokenizer": {"kind": "hf_auto", "model": str(self.model)},
            "data": [data],
        }

    async def send(self, name: str, load: Load, url: str, rate: float) -> dict[str, Any]:
        """Run a load; return the benchmark of guidellm's report.

        Raises:
            SetupError: guidellm failed.
        """
        report = self.output / f"guidellm-{name}.json"
        spec = self.spec(load, url, rate)
        spec["outputs"] = [{"kind": "json", "path": str(report)}]
        config = self.output / f"guidellm-{name}.config.json"
        config.write_text(json.dumps({"spec": spec}))
        report.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            *("env", "HF_HUB_OFFLINE=1", self.program, "run", "--disable-console"),
            *("--config", config),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self.seconds + END_SECONDS):
                shown, _ = await process.communicate()
        except TimeoutError:
            raise SetupError(f"guidellm did not end within {END_SECONDS:g} s") from None
        finally:
            await kill_session(process)
        if process.returncode or not report.exists():
            last = shown.decode(errors="replace").strip().splitlines()[-1:]
            raise SetupError(f"guidellm ended with {process.returncode}: {' '.join(last)}")
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        return dict(benchmark)


async def _run(
    loads: Mapping[str, Load], deployment: Deployment, client: Client, rate: float | None
) -> list[LoadResult]:
    results: list[LoadResult] = []
    allowed = os.sched_getaffinity(0)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(deployed(deployment))
        # guidellm and this process use the CPUs that run no model.
        os.sched_setaffinity(0, {int(cpu) for cpu in deployment.plan().others.split(",")})
        stack.callback(os.sched_setaffinity, 0, allowed)
        target = await stack.enter_async_context(
            TargetClient(running.target.grpc_address, ready_seconds=0)
        )
        calls = reference_calls()
        expected = [await generate(target, call) for call in calls]
        for name, load in loads.items():
            err.print(f"{name}: {client.seconds:g} s")
            capacity = next((r.requests_per_second for r in results if r.load == "streams"), 0.0)
            own_rate = load.rate or rate or OVERLOAD * max(capacity, 0.1)
            results.append(
                await measure(
                    name, load, running, TextCheck(target, calls, expected), client, own_rate
                )
            )
            # A later load can fail.
            report = json.dumps([asdict(result) for result in results], indent=1)
            (client.output / "serve.json").write_text(report)
    return results


async def measure(
    name: str,
    load: Load,
    running: RunningDeployment,
    texts: "TextCheck",
    client: Client,
    rate: float,
) -> LoadResult:
    """Run one load and its checks."""
    assert running.gateway is not None
    processes = (running.target, *running.drafts, running.gateway)
    before = await _refusals(running)
    pids = {process.name: process.pid for process in processes}
    async with recorded(pids) as log, texts.repeated():
        url = f"http://{running.gateway.http_address}"
        benchmark = await client.send(name, load, url, rate)
    await texts.compare()
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    requests = {name: int(totals[name]) for name in ("successful", "errored", "incomplete")}
    refusals = int(await _refusals(running) - before)
    errors = requests["errored"] - (refusals - texts.refused)
    growth = log.growth(benchmark["start_time"], benchmark["end_time"])
    checks = {
        f"{errors} requests failed": errors > 0,
        f"{refusals} requests were refused": refusals > 0 and not (load.is_overload or load.rate),
        "no request was refused": load.is_overload and not refusals,
        "no request ended": not requests["successful"],
        "no text was compared": not texts.compared,
        f"{texts.changed} of {texts.compared} texts changed": texts.changed > 0,
        **{f"{held} is not freed": True for held in await leftovers(running)},
        **{str(row): True for row in growth if not row.is_flat},
    }
    return LoadResult(
        load=name,
        requests=requests,
        refusals=refusals,
        requests_per_second=metrics["requests_per_second"]["successful"]["mean"],
        texts=texts.compared,
        problems=[problem for problem, has_failed in checks.items() if has_failed],
        rate=load.rate,
        latency_ms={
            name: {
                percentile: metrics[key]["successful"]["percentiles"][percentile]
                for percentile in PERCENTILES
            }
            for name, key in LATENCIES.items()
            if load.rate and requests["successful"]
        },
        growth=growth,
    )


def reference_calls() -> list[GenerateCall]:
    """Return requests whose texts must not depend on what else runs."""
    return [
        GenerateCall(
            prompt=prompt,
            sampling=SamplingParams(
                temperature=float(index % 2),
                ignore_eos=True,
                seed=index,
                max_tokens=TEXT_TOKENS,
            ),
        )
        for index, prompt in enumerate(held_out_prompts(NUM_TEXTS, num_chars=PROMPT_CHARS))
    ]


async def generate(client: TargetClient, call: GenerateCall) -> tuple[TokenId, ...]:
    """Return the tokens of a request."""
    return tuple([token async for chunk in client.generate(call) for token in chunk.token_ids])


@dataclass(slots=True)
class TextCheck:
    """Compares texts with those before the load."""

    client: TargetClient
    calls: Sequence[GenerateCall]
    expected: Sequence[tuple[TokenId, ...]]
    compared: int = 0
    changed: int = 0
    refused: int = 0

    async def compare(self) -> None:
        """Generate each text once."""
        for call, expected in zip(self.calls, self.expected, strict=True):
            try:
                token_ids = await generate(self.client, call)
            except OverloadedError as error:
                self.refused += 1
                await asyncio.sleep(error.retry_after_seconds or 1.0)
                continue
            self.compared += 1
            self.changed += token_ids != expected

    @contextlib.asynccontextmanager
    async def repeated(self) -> AsyncIterator[None]:
        """Compare all the time while the context is entered."""

        async def repeat() -> None:
            while True:
                await self.compare()

        async with beside(repeat()) as (repeating,):
            yield
            if repeating.done():
                repeating.result()


async def _refusals(running: RunningDeployment) -> float:
    return (await scrape(running.target.http_address)).get(_REFUSALS, 0.0)


async def leftovers(running: RunningDeployment) -> list[str]:
    """Return what target and drafts still hold although no request is open.

    Waits up to ``SETTLE_SECONDS`` until nothing is left.
    """
    held: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                held = await _held(running)
                if not held:
                    break
                await asyncio.sleep(_POLL_SECONDS)
    return held


async def _held(running: RunningDeployment) -> list[str]:
    held = []
    for process, names in ((running.target, _OF_TARGET), *((d, _OF_DRAFT) for d in running.drafts)):
        gauges = await scrape(process.http_address)
        held += [
            f"{name} of {process.name}: {gauges[name]:g}" for name in names if gauges.get(name)
        ]
    return held


def table(results: Sequence[LoadResult]) -> Table:
    """Return the results; those of clients are in guidellm's reports."""
    summary = Table("load", "requests", "requests/s", "refused", "texts", "memory, MiB", "problems")
    for result in results:
        memory = [row for row in result.growth if row.resource == "memory_bytes"]
        sizes = [f"{row.process} {row.begin / MIB:.0f} → {row.end / MIB:.0f}" for row in memory]
        summary.add_row(
            result.load,
            ", ".join(f"{count} {outcome}" for outcome, count in result.requests.items() if count),
            f"{result.requests_per_second:.2f}",
            str(result.refusals),
            str(result.texts),
            "\n".join(sizes) or "too short",
            "\n".join(result.problems) or "none",
        )
    return summary
