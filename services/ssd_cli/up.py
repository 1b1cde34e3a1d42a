"""``ssd up``: a target and its drafts on this machine until Ctrl-C."""

import asyncio
import contextlib
import json
import signal
import urllib.request
from collections.abc import AsyncIterator

from prometheus_client.parser import text_string_to_metric_families
from rich.live import Live
from rich.text import Text

from ssd.errors import SetupError
from ssd.launch import (
    ChildProcess,
    CpuPlan,
    Deployment,
    RunningDeployment,
    deployed,
    draft_process,
    plan_cpus,
)
from ssd.telemetry import Event
from ssd_cli.display import err, out, startup_progress

REFRESH_SECONDS = 1.0
RESTART_SECONDS = 1.0
"""Before a dead draft is started again; doubled each time, up to a minute."""
LONGEST_RESTART_SECONDS = 60.0


async def up(deployment: Deployment, *, is_json: bool) -> None:
    """Run until SIGINT or SIGTERM.

    Raises:
        SetupError: a process cannot start, or the target ended by itself.
    """
    plan = plan_cpus(deployment.allowed_cpus, deployment.num_drafts)
    if plan.is_shared:
        err.print("[yellow]one CPU:[/yellow] target and drafts share it; expect no speed-up")
    async with contextlib.AsyncExitStack() as stack:
        with startup_progress(is_quiet=is_json) as on_event:
            running = await stack.enter_async_context(deployed(deployment, on_event))
        _announce(running, is_json=is_json)
        watchers = await stack.enter_async_context(_watching(running, deployment, plan))
        leaving = asyncio.create_task(_signalled())
        status = asyncio.create_task(_show_status(running, is_quiet=is_json))
        target = asyncio.create_task(running.target.wait())
        await asyncio.wait({leaving, target}, return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, status, *watchers):
            task.cancel()
        await asyncio.gather(leaving, status, *watchers, return_exceptions=True)
        if target.done():
            raise SetupError(running.target.failure())
        target.cancel()
        if not is_json:
            err.print("stopping")


def _announce(running: RunningDeployment, *, is_json: bool) -> None:
    addresses = {
        "target": {"grpc": running.target.grpc_address, "http": running.target.http_address},
        "drafts": [
            {"grpc": draft.grpc_address, "http": draft.http_address} for draft in running.drafts
        ],
    }
    if is_json:
        out.print(json.dumps(addresses))
        return
    for child in (running.target, *running.drafts):
        err.print(f"[bold]{child.name}[/bold] {child.grpc_address}  http {child.http_address}")
    err.print(f'try: ssd generate --endpoint {running.target.grpc_address} "def fib(n):"')


@contextlib.asynccontextmanager
async def _watching(
    running: RunningDeployment, deployment: Deployment, plan: CpuPlan
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Start dead drafts again, at their old address; yields the watching tasks."""
    replacements: list[ChildProcess] = []
    tasks = [
        asyncio.create_task(_revive(draft, index, deployment, plan, replacements))
        for index, draft in enumerate(running.drafts)
    ]
    try:
        yield tasks
    finally:
        await asyncio.gather(*(child.stop() for child in replacements))


async def _revive(
    draft: ChildProcess,
    index: int,
    deployment: Deployment,
    plan: CpuPlan,
    replacements: list[ChildProcess],
) -> None:
    delay = RESTART_SECONDS
    port = int(draft.grpc_address.rpartition(":")[2])
    while True:
        await draft.wait()
        err.print(f"[yellow]{draft.failure()}[/yellow]; starting it again in {delay:g} s")
        await asyncio.sleep(delay)
        delay = min(2 * delay, LONGEST_RESTART_SECONDS)
        draft = draft_process(deployment, plan, index, _ignore, port=port)
        replacements.append(draft)
        await draft.start()


def _ignore(_name: str, _event: Event) -> None:
    """Nobody watches the start of a replacement."""


async def _signalled() -> None:
    """Return when the process is told to leave."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await told.wait()


async def _show_status(running: RunningDeployment, *, is_quiet: bool) -> None:
    if is_quiet or not err.is_terminal:
        return
    url = f"http://{running.target.http_address}/metrics"
    last: dict[str, float] = {}
    with Live(console=err, transient=True, auto_refresh=False) as live:
        while True:
            with contextlib.suppress(OSError):
                now = await asyncio.to_thread(_read_metrics, url)
                live.update(Text(status_line(last or now, now), style="dim"), refresh=True)
                last = now
            await asyncio.sleep(REFRESH_SECONDS)


def _read_metrics(url: str) -> dict[str, float]:
    """Return the samples of a target, labels in the name: ``ssd_rounds_total{hit}``."""
    with urllib.request.urlopen(url, timeout=REFRESH_SECONDS) as answer:  # noqa: S310
        families = text_string_to_metric_families(answer.read().decode())
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def status_line(before: dict[str, float], now: dict[str, float]) -> str:
    """Return one line about what happened between two readings, a second apart."""

    def grown(name: str) -> float:
        return now.get(name, 0.0) - before.get(name, 0.0)

    tables = {kind: grown(f"ssd_rounds_total{{{kind}}}") for kind in ("hit", "miss", "late")}
    looked_up = sum(tables.values())
    hits = f"{tables['hit'] / looked_up:.0%}" if looked_up else "–"
    running = now.get("ssd_running_sequences", 0.0)
    waiting = now.get("ssd_waiting_sequences", 0.0)
    return (
        f"running {running:.0f}  waiting {waiting:.0f}  "
        f"{grown('ssd_tokens_total{output}') / REFRESH_SECONDS:.0f} tokens/s  hits {hits}  "
        "Ctrl-C stops"
    )
