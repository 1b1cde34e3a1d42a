"""``ssd up``: a target and its drafts on this machine until Ctrl-C."""

import asyncio
import contextlib
import json
import signal
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.live import Live
from rich.text import Text

from ssd.cpu_plan import CpuPlan, plan_cpus
from ssd.launch import ChildProcess, Deployment, RunningDeployment, deployed, draft_process
from ssd.telemetry import Event, SystemClock
from ssd_cli.display import err, say, startup_progress, write

REFRESH_SECONDS = 1.0
RESTART_SECONDS = 1.0
"""Before a dead draft is started again; doubled each time that it dies young, up to a minute."""
LONGEST_RESTART_SECONDS = 60.0
STEADY_SECONDS = 120.0
"""A draft that has lived this long, its start included, did not die of how it is started."""


async def up(deployment: Deployment, *, is_json: bool, is_debug: bool = False) -> int:
    """Run until SIGINT or SIGTERM, which may also come while the processes start.

    With ``is_debug`` the stack of a draft that crashes is shown.

    Returns:
        The exit code: 0 if all were ready before the signal, else 128 and its number, as of a
        program that the signal ended.

    Raises:
        SetupError: a process cannot start, or the target ended by itself.
    """
    is_ready = asyncio.Event()
    leaving = asyncio.create_task(_signalled())
    work = asyncio.create_task(_run(deployment, is_ready, is_json=is_json, is_debug=is_debug))
    try:
        await asyncio.wait({leaving, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not is_json:
            err.print("stopping")
    finally:
        leaving.cancel()
        # Leaving the block below the task stops the processes and waits for them.
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return 0 if is_ready.is_set() else 128 + leaving.result()


async def _run(
    deployment: Deployment, is_ready: asyncio.Event, *, is_json: bool, is_debug: bool
) -> None:
    """Start everything, then watch it until cancelled or until the target ends."""
    plan = plan_cpus(deployment.allowed_cpus, deployment.num_drafts)
    async with contextlib.AsyncExitStack() as stack:
        with startup_progress(is_quiet=is_json) as on_event:
            running = await stack.enter_async_context(deployed(deployment, on_event))
        is_ready.set()
        _announce(running, is_json=is_json)
        await stack.enter_async_context(_watching(running, deployment, plan, is_debug=is_debug))
        status = asyncio.create_task(_show_status(running, is_quiet=is_json))
        try:
            await running.target.wait()
        finally:
            status.cancel()
            await asyncio.gather(status, return_exceptions=True)
        raise running.target.failure()


def _announce(running: RunningDeployment, *, is_json: bool) -> None:
    addresses = {
        "target": {"grpc": running.target.grpc_address, "http": running.target.http_address},
        "drafts": [
            {"grpc": draft.grpc_address, "http": draft.http_address} for draft in running.drafts
        ],
    }
    if is_json:
        write(json.dumps(addresses) + "\n")
        return
    for child in (running.target, *running.drafts):
        err.print(f"[bold]{child.name}[/bold] {child.grpc_address}  http {child.http_address}")
    err.print(f'try: ssd generate --endpoint {running.target.grpc_address} "def fib(n):"')


@contextlib.asynccontextmanager
async def _watching(
    running: RunningDeployment, deployment: Deployment, plan: CpuPlan, *, is_debug: bool
) -> AsyncIterator[None]:
    """Inside, a dead draft is started again, at its old address."""
    replacements: list[ChildProcess] = []
    tasks = [
        asyncio.create_task(
            _revive(draft, index, deployment, plan, replacements, is_debug=is_debug)
        )
        for index, draft in enumerate(running.drafts)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in replacements))


async def _revive(
    draft: ChildProcess,
    index: int,
    deployment: Deployment,
    plan: CpuPlan,
    replacements: list[ChildProcess],
    *,
    is_debug: bool,
) -> None:
    clock = SystemClock()
    delay = 0.0
    port = int(draft.grpc_address.rpartition(":")[2])
    while True:
        started = clock.now()
        await draft.wait()
        delay = restart_delay(delay, clock.now() - started)
        failure = draft.failure()
        say("warning", f"{failure}; starting it again in {delay:g} s")
        if is_debug:
            err.print("\n".join(getattr(failure, "__notes__", ())), markup=False, emoji=False)
        await asyncio.sleep(delay)
        draft = draft_process(deployment, plan, index, _say_ready, port=port)
        replacements.append(draft)
        await draft.start()


def restart_delay(last_seconds: float, lived_seconds: float) -> float:
    """Return how long to wait before a dead draft is started again, seconds.

    Args:
        last_seconds: the wait before it was started; 0 for the first start.
        lived_seconds: from that start to its death.
    """
    if lived_seconds >= STEADY_SECONDS:
        return RESTART_SECONDS
    return max(RESTART_SECONDS, min(2 * last_seconds, LONGEST_RESTART_SECONDS))


def _say_ready(name: str, event: Event) -> None:
    if event.name == "ready":
        say(name, "ready again", "green")


async def _signalled() -> int:
    """Return the first signal that asks the process to leave; later ones change nothing."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[int] = loop.create_future()

    def receive(number: int) -> None:
        if not received.done():
            received.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive, int(number))
    return await received


async def _show_status(running: RunningDeployment, *, is_quiet: bool) -> None:
    if is_quiet or not err.is_terminal:
        return
    url = f"http://{running.target.http_address}/metrics"
    last: Reading | None = None
    with Live(console=err, transient=True, auto_refresh=False) as live:
        while True:
            with contextlib.suppress(OSError, ValueError):
                now = await asyncio.to_thread(_read_metrics, url)
                live.update(Text(status_line(last or now, now), style="dim"), refresh=True)
                last = now
            await asyncio.sleep(REFRESH_SECONDS)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a target's metrics said at one time."""

    seconds: float
    """Of a monotonic clock."""
    samples: dict[str, float]
    """By name with the labels' values in it: ``ssd_rounds_total{hit}``."""


def _read_metrics(url: str) -> Reading:
    with urllib.request.urlopen(url, timeout=REFRESH_SECONDS) as answer:  # noqa: S310
        families = text_string_to_metric_families(answer.read().decode())
    samples = {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    return Reading(SystemClock().now(), samples)


def status_line(before: Reading, now: Reading) -> str:
    """Return one line about what happened between two readings."""

    def grown(name: str) -> float:
        return now.samples.get(name, 0.0) - before.samples.get(name, 0.0)

    seconds = now.seconds - before.seconds
    speed = grown("ssd_tokens_total{output}") / seconds if seconds > 0 else 0.0
    tables = {kind: grown(f"ssd_rounds_total{{{kind}}}") for kind in ("hit", "miss", "late")}
    looked_up = sum(tables.values())
    hits = f"{tables['hit'] / looked_up:.0%}" if looked_up else "–"
    ended = sum(
        value for name, value in now.samples.items() if name.startswith("ssd_requests_total{")
    )
    running = now.samples.get("ssd_running_sequences", 0.0)
    waiting = now.samples.get("ssd_waiting_sequences", 0.0)
    return (
        f"requests {ended:.0f}  running {running:.0f}  waiting {waiting:.0f}  "
        f"{speed:.0f} tokens/s  hits {hits}  Ctrl-C stops"
    )
