"""``ssd up``: a target and its drafts on this machine until Ctrl-C."""

import asyncio
import contextlib
import hashlib
import json
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import typer
from rich.live import Live
from rich.text import Text

from ssd.console import can_redraw
from ssd.errors import AddressError
from ssd.observability.log import Event
from ssd.observability.scrape import scrape
from ssd.ports import SystemClock
from ssd.runtime.cpu_plan import CpuPlan
from ssd.runtime.launch import (
    DRAIN_SECONDS,
    ChildProcess,
    Deployment,
    EventListener,
    RunningDeployment,
    deployed,
    draft_process,
    gateway_process,
)
from ssd.settings import cache_folder, find_text
from ssd.tasks import beside
from ssd_cli.commands import debug_of_app, program
from ssd_cli.display import (
    err,
    print_if_possible,
    report,
    report_event,
    startup_progress,
    write,
)

_HOST = "127.0.0.1"
"""Default host of the processes."""
GATEWAY_PORT = 8000
"""Default port of the gateway."""
DIGEST_CHARS = 16
REFRESH_SECONDS = 1.0
RESTART_SECONDS = 1.0
"""Pause before a failed draft or gateway is restarted; doubled after each early failure, up to a
minute."""
LONGEST_RESTART_SECONDS = 60.0
STEADY_SECONDS = 120.0
"""A draft that ran this long, including its start, did not fail because of its settings."""


async def up(deployment: Deployment, *, is_json: bool) -> int:
    """Run until SIGINT or SIGTERM, which can also arrive while the processes start.

    Returns:
        The exit code: 0 if all processes were ready before the signal, else 128 plus its number, as
        of a program that the signal ended.

    Raises:
        SetupError: a process cannot start, or the target ended.
    """
    check_ports(deployment)
    folder = state_folder(deployment.target, deployment.draft, deployment.port)
    deployment = replace(deployment, state_folder=folder)
    is_ready = asyncio.Event()
    run = _run(deployment, is_ready, is_json=is_json)
    async with beside(_first_signal(), run) as (signalled, running):
        await asyncio.wait({signalled, running}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not is_json:
            streams = f"; streams have {DRAIN_SECONDS:g} s to end" if is_ready.is_set() else ""
            print_if_possible(f"stopping{streams}")
    # At its end, the cancelled task has stopped the processes.
    if not running.cancelled():
        running.result()
    return 0 if is_ready.is_set() else 128 + signalled.result()


def state_folder(target: str, draft: str, port: int) -> str:
    """Return the folder below which each draft of ``ssd up`` keeps its fan-out.

    It is that of the environment, or empty if the user has no home folder. A fit is of a pair, so
    another pair has another folder, and so has a deployment at another port.

    *Decision*: only ``ssd up`` keeps fits. *Because* the processes of other commands end after a
    few texts, and a measurement must not depend on the one before.
    """
    names = (model if "://" in model else str(Path(model).absolute()) for model in (target, draft))
    digest = hashlib.sha256(json.dumps([*names, port]).encode()).hexdigest()
    try:
        own = str(cache_folder() / "fan_out" / digest[:DIGEST_CHARS])
    except RuntimeError:
        own = ""
    return find_text("state_folder", (), prefix="SSD_DRAFT", default=own)


def check_overlaps(deployment: Deployment) -> None:
    """Refuse flags that give one port to two processes.

    Raises:
        typer.BadParameter: names the flags.
    """
    count = 1 + deployment.num_drafts
    ranges = (
        ("--port", deployment.port, count),
        ("--http-port", deployment.http_port, count),
        ("--gateway-port", deployment.gateway_port or 0, 1),
    )
    used = [(flag, first, first + size - 1) for flag, first, size in ranges if first]
    for (flag, first, last), (other, other_first, other_last) in combinations(used, 2):
        if first <= other_last and other_first <= last:
            raise typer.BadParameter(
                f"{flag} {first} and {other} {other_first} overlap: target and drafts use the "
                f"ports {first}..{last} of {flag}"
            )


def check_ports(deployment: Deployment) -> None:
    """Check that all ports are free. Each process would only report its first port in use.

    Raises:
        AddressError: names all ports that are in use.
    """
    processes = ["target", *(f"draft {index}" for index in range(deployment.num_drafts))]
    taken = [
        f"{first + index} ({kind}, {name})"
        for kind, first in (("gRPC", deployment.port), ("HTTP", deployment.http_port))
        for index, name in enumerate(processes)
        if first and not _is_free(first + index)
    ]
    if deployment.gateway_port and not _is_free(deployment.gateway_port):
        taken.append(f"{deployment.gateway_port} (HTTP, gateway)")
    if taken:
        ports = "port" if len(taken) == 1 else "ports"
        raise AddressError(
            f"{ports} in use: {', '.join(taken)}; choose another --port, --http-port or "
            "--gateway-port, or 0 for any free port"
        )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Servers set this option too: the port of a connection that has ended is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


async def _run(deployment: Deployment, is_ready: asyncio.Event, *, is_json: bool) -> None:
    """Start all processes; run until cancelled or until the target ends."""
    plan = deployment.plan()
    async with contextlib.AsyncExitStack() as stack:
        with startup_progress(is_quiet=is_json) as on_event:
            listener = _reporting(on_event)
            running = await stack.enter_async_context(deployed(deployment, listener))
        is_ready.set()
        _announce(running, is_json=is_json)
        await stack.enter_async_context(_watching(running, deployment, plan))
        async with beside(_show_status(running, is_quiet=is_json)):
            await running.target.wait()
        raise running.target.failure()


def _announce(running: RunningDeployment, *, is_json: bool) -> None:
    addresses: dict[str, object] = {
        "target": {"grpc": running.target.grpc_address, "http": running.target.http_address},
        "drafts": [
            {"grpc": draft.grpc_address, "http": draft.http_address} for draft in running.drafts
        ],
    }
    if running.gateway is not None:
        addresses["gateway"] = {"http": running.gateway.http_address}
    if is_json:
        write(json.dumps(addresses) + "\n")
        return
    for child in (running.target, *running.drafts):
        print_if_possible(
            Text.assemble((child.name, "bold"), f" {child.grpc_address}  http {child.http_address}")
        )
    if running.gateway is not None:
        base = f"http://{running.gateway.http_address}"
        print_if_possible(Text.assemble(("gateway", "bold"), f" {base}/v1  playground {base}/"))
    flags = credential_flags()
    command = f"{program()} generate --endpoint {running.target.grpc_address} {flags}"
    print_if_possible(Text(f'try: {command}"def fib(n):"'))


def credential_flags(environ: Mapping[str, str] | None = None) -> str:
    """Return the flags with which ``ssd generate`` calls a target with this environment.

    Those that the command reads from the environment are left out. A file that the environment does
    not name is in capitals.

    Args:
        environ: the environment; the process's own when None.
    """
    find = partial(find_text, argv=(), environ=environ)
    is_mutual = find("tls_client_ca", prefix="SSD_TARGET")
    own = ("tls_certificate", "certificate", is_mutual), ("tls_key", "key", is_mutual)
    flags = ("tls_ca", "ca", find("tls_certificate", prefix="SSD_TARGET")), *own
    files = {
        name: find(f"target_{of_gateway}", prefix="SSD_GATEWAY", default=f"{name.upper()}.PEM")
        for name, of_gateway, is_needed in flags
        if is_needed
    }
    if token_file := find("token_file", prefix="SSD_TARGET"):
        files["token_file"] = token_file
    return "".join(
        f"--{name.replace('_', '-')} {shlex.quote(file)} "
        for name, file in files.items()
        if not find(name, prefix="SSD")
    )


@contextlib.asynccontextmanager
async def _watching(
    running: RunningDeployment, deployment: Deployment, plan: CpuPlan
) -> AsyncIterator[None]:
    """Restart failed drafts and a failed gateway at their old addresses during the block."""
    replacements: list[ChildProcess] = []
    makers = [
        partial(draft_process, deployment, plan, index, port=_port(draft.grpc_address))
        for index, draft in enumerate(running.drafts)
    ]
    watched = list(zip(running.drafts, makers, strict=True))
    if running.gateway is not None:
        port = _port(running.gateway.http_address)
        make = partial(gateway_process, running.target.grpc_address, port=port)
        watched.append((running.gateway, make))
    try:
        async with beside(*(_restart(child, make, replacements) for child, make in watched)):
            yield
    finally:
        await asyncio.gather(*(child.stop() for child in replacements))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def _restart(
    child: ChildProcess,
    make: Callable[[EventListener], ChildProcess],
    replacements: list[ChildProcess],
) -> None:
    """Start a child again whenever it ends; ``--debug`` also prints its stack."""
    clock = SystemClock()
    delay = 0.0
    while True:
        started = clock.now()
        await child.wait()
        delay = restart_delay(delay, clock.now() - started)
        failure = child.failure()
        report("warning", f"{failure}; restarting it in {delay:g} s")
        if debug_of_app.get():
            print_if_possible(Text("\n".join(getattr(failure, "__notes__", ()))))
        await asyncio.sleep(delay)
        child = make(_reporting(_report_ready))
        replacements.append(child)
        await child.start()


def restart_delay(last_seconds: float, lived_seconds: float) -> float:
    """Return the pause before a failed draft is restarted, in seconds.

    Args:
        last_seconds: the pause before its last start; 0 for the first start.
        lived_seconds: time from that start to its end.
    """
    if lived_seconds >= STEADY_SECONDS:
        return RESTART_SECONDS
    return max(RESTART_SECONDS, min(2 * last_seconds, LONGEST_RESTART_SECONDS))


def _reporting(on_event: EventListener) -> EventListener:
    """Return a listener that also prints problems of processes, and with ``--debug`` each event."""
    is_debug = debug_of_app.get()

    def listen(name: str, event: Event) -> None:
        report_event(name, event, is_debug=is_debug)
        on_event(name, event)

    return listen


def _report_ready(name: str, event: Event) -> None:
    if event.name == "ready":
        report(name, "ready again", "green")


async def _first_signal() -> int:
    """Return the number of the first SIGINT or SIGTERM; ignore later ones."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[int] = loop.create_future()

    def receive(number: int) -> None:
        if not received.done():
            received.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive, int(number))
    return await received


async def _show_status(running: RunningDeployment, *, is_quiet: bool) -> None:
    if is_quiet or not can_redraw(err):
        return
    clock = SystemClock()
    last: tuple[float, dict[str, float]] | None = None
    with Live(console=err, transient=True, auto_refresh=False) as live:
        while True:
            with contextlib.suppress(OSError, ValueError):
                now = await scrape(running.target.http_address, REFRESH_SECONDS)
                read_at = clock.now()
                before_at, before = last or (read_at, now)
                line = status_line(before, now, read_at - before_at)
                live.update(Text(line, style="dim"), refresh=True)
                last = read_at, now
            await asyncio.sleep(REFRESH_SECONDS)


def status_line(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> str:
    """Return one line with the changes between two readings, ``seconds`` apart.

    The readings are samples by their names, as ``scrape`` returns them.
    """

    def growth(name: str) -> float:
        return now.get(name, 0.0) - before.get(name, 0.0)

    speed = growth('ssd_tokens_total{kind="output"}') / seconds if seconds > 0 else 0.0
    kinds = ("hit", "miss", "late")
    tables = {kind: growth(f'ssd_rounds_total{{result="{kind}"}}') for kind in kinds}
    looked_up = sum(tables.values())
    hits = f"{tables['hit'] / looked_up:.0%}" if looked_up else "–"
    ended = sum(value for name, value in now.items() if name.startswith("ssd_requests_total{"))
    running = now.get("ssd_running_sequences", 0.0)
    waiting = now.get("ssd_waiting_sequences", 0.0)
    return (
        f"requests {ended:.0f}  running {running:.0f}  waiting {waiting:.0f}  "
        f"{speed:.0f} tokens/s  hits {hits}  Ctrl-C to stop"
    )
