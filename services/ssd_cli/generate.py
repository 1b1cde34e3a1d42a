"""``ssd generate``: one continuation, from a running target or from a temporary one."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import typer

from ssd.errors import NotReadyError, SSDError
from ssd.launch import Deployment, deployed
from ssd.rpc.client import READY_SECONDS, TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials
from ssd.types import Mode
from ssd_cli.display import report, startup_progress
from ssd_cli.figures import Collector, why_not_speculative

HINT_ROUNDS = 20
"""Number of rounds from which a text without a hit gets a hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The target of a continuation."""

    endpoint: str | None
    """Address of a running target; None: start ``deployment`` and stop it afterwards."""
    deployment: Deployment
    wait_seconds: float = READY_SECONDS
    """Maximum time to wait until a running target is ready."""
    credentials: ClientCredentials = NO_CREDENTIALS
    """For a running target."""
    is_quiet: bool
    """Show no progress and no hints, for output that a machine reads."""


async def generate(
    options: GenerateOptions,
    call: GenerateCall,
    collector: Collector,
    on_text: Callable[[str], None],
) -> str:
    """Continue a prompt; return a hint if no round was a hit, else an empty string.

    Args:
        options: the target.
        call: the prompt and its parameters.
        collector: receives each chunk, also those before an error or a cancellation.
        on_text: receives each new piece of text.

    Raises:
        SSDError: the processes cannot start, or the request fails.
    """
    async with connected(options) as client:
        await stream(client, call, collector, on_text)
        return "" if options.is_quiet else await _hint(client, call.mode, collector)


async def _hint(client: TargetClient, mode: Mode, collector: Collector) -> str:
    figures = collector.finish().figures
    uses_tables = mode not in (Mode.AUTOREGRESSIVE, Mode.SYNCHRONOUS)
    if not uses_tables or figures.hits or (figures.rounds or 0) < HINT_ROUNDS:
        return ""
    try:
        links = (await client.pool_status()).links
    except SSDError:
        # The text is complete, so an error of this second call is not reported.
        return ""
    # In AUTO mode, a target without drafts is not expected to speculate.
    if mode is Mode.AUTO and not links:
        return ""
    missing = "a hit" if figures.misses or figures.late else "speculative"
    return f"no round was {missing}: {why_not_speculative(figures, links)}"


async def stream(
    client: TargetClient,
    call: GenerateCall,
    collector: Collector,
    on_text: Callable[[str], None],
) -> None:
    """Continue a prompt on a target; arguments as in ``generate``."""
    collector.start()
    async for chunk in client.generate(call):
        collector.add(chunk)
        on_text(chunk.text)


@contextlib.asynccontextmanager
async def connected(options: GenerateOptions) -> AsyncIterator[TargetClient]:
    """Yield a client of the target, which is started first if it does not run.

    Raises:
        SSDError: the processes cannot start.
    """
    if options.endpoint is not None:

        def show_wait(reason: NotReadyError) -> None:
            if not options.is_quiet:
                report("waiting", f"{reason}; waiting at most {options.wait_seconds:g} s")

        async with TargetClient(
            options.endpoint,
            credentials=options.credentials,
            ready_seconds=options.wait_seconds,
            on_wait=show_wait,
        ) as client:
            yield client
        return
    async with contextlib.AsyncExitStack() as stack:
        with startup_progress(is_quiet=options.is_quiet) as on_event:
            running = await stack.enter_async_context(deployed(options.deployment, on_event))
        # No other process restarts this target, so the client does not wait for it.
        client = TargetClient(running.target.grpc_address, ready_seconds=0)
        yield await stack.enter_async_context(client)


def check_endpoint(endpoint: str) -> None:
    """Raise ``typer.BadParameter`` unless it is ``host:port``."""
    host, _, port = endpoint.rpartition(":")
    # gRPC would connect to a port above 65535 modulo 65536.
    is_port = port.isdecimal() and 1 <= int(port) <= 65535
    if not host or "/" in host.removeprefix("dns:///") or not is_port:
        raise typer.BadParameter(
            f"--endpoint {endpoint!r} is not host:port with port 1..65535, for example "
            "127.0.0.1:50051"
        )
