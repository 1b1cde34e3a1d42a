"""``ssd generate``: one continuation, from a running target or from one started for it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ssd.errors import NotReadyError, SSDError
from ssd.launch import Deployment, deployed
from ssd.rpc.client import READY_SECONDS, TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import Mode
from ssd_cli.display import say, startup_progress
from ssd_cli.figures import Collector, why_not_speculative

HINT_ROUNDS = 20
"""A shorter text without a hit needs no explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Where a continuation comes from."""

    endpoint: str | None
    """A running target; None starts ``deployment`` and stops it again."""
    deployment: Deployment
    wait_seconds: float = READY_SECONDS
    """How long a running target may take to be ready."""
    is_quiet: bool
    """No progress: somebody reads the output by machine."""


async def generate(
    options: GenerateOptions,
    call: GenerateCall,
    collector: Collector,
    on_text: Callable[[str], None],
) -> str:
    """Continue a prompt; returns why speculation gave nothing, empty if there is no hint.

    Args:
        options: where.
        call: what.
        collector: gets each chunk; it has what there is also when this is cancelled.
        on_text: gets each new piece of text.

    Raises:
        SSDError: the processes cannot start, or the target refuses.
    """
    async with _client(options) as client:
        await stream(client, call, collector, on_text)
        return "" if options.is_quiet else await _hint(client, call.mode, collector)


async def _hint(client: TargetClient, mode: Mode, collector: Collector) -> str:
    figures = collector.finish().figures
    is_plain = mode is Mode.AUTOREGRESSIVE
    if is_plain or figures.hits or (figures.rounds or 0) < HINT_ROUNDS:
        return ""
    try:
        links = (await client.pool_status()).links
    except SSDError:
        # The text is complete: a target that refuses to describe its pool is no error here.
        return ""
    # A target without drafts speculates only if it is asked to.
    if mode is Mode.AUTO and not links:
        return ""
    return f"no round was speculative: {why_not_speculative(figures, links)}"


async def stream(
    client: TargetClient,
    call: GenerateCall,
    collector: Collector,
    on_text: Callable[[str], None],
) -> None:
    """Continue a prompt on a target; see ``generate``."""
    collector.start()
    async for chunk in client.generate(call):
        collector.add(chunk)
        on_text(chunk.text)


@contextlib.asynccontextmanager
async def _client(options: GenerateOptions) -> AsyncIterator[TargetClient]:
    if options.endpoint is not None:

        def show_wait(reason: NotReadyError) -> None:
            if not options.is_quiet:
                say("waiting", f"{reason}; for {options.wait_seconds:g} s at most")

        async with TargetClient(
            options.endpoint, ready_seconds=options.wait_seconds, on_wait=show_wait
        ) as client:
            yield client
        return
    async with contextlib.AsyncExitStack() as stack:
        with startup_progress(is_quiet=options.is_quiet) as on_event:
            running = await stack.enter_async_context(deployed(options.deployment, on_event))
        # This target is not started again: its end is an error at once.
        client = TargetClient(running.target.grpc_address, ready_seconds=0)
        yield await stack.enter_async_context(client)
