"""``ssd generate``: one continuation, from a running target or from one started for it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ssd.launch import Deployment, deployed
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd_cli.display import startup_progress
from ssd_cli.figures import Collector, Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Where a continuation comes from."""

    endpoint: str | None
    """A running target; None starts ``deployment`` and stops it again."""
    deployment: Deployment
    is_quiet: bool
    """No progress: somebody reads the output by machine."""


async def generate(
    options: GenerateOptions, call: GenerateCall, on_text: Callable[[str], None]
) -> Generation:
    """Continue a prompt.

    Args:
        options: where.
        call: what.
        on_text: gets each new piece of text.

    Raises:
        SSDError: the processes cannot start, or the target refuses.
    """
    async with _endpoint(options) as endpoint, TargetClient(endpoint) as client:
        return await stream(client, call, on_text)


async def stream(
    client: TargetClient, call: GenerateCall, on_text: Callable[[str], None]
) -> Generation:
    """Continue a prompt on a target; see ``generate``."""
    collector = Collector()
    async for chunk in client.generate(call):
        collector.add(chunk)
        on_text(chunk.text)
    return collector.finish()


@contextlib.asynccontextmanager
async def _endpoint(options: GenerateOptions) -> AsyncIterator[str]:
    if options.endpoint is not None:
        yield options.endpoint
        return
    async with contextlib.AsyncExitStack() as stack:
        with startup_progress(is_quiet=options.is_quiet) as on_event:
            running = await stack.enter_async_context(deployed(options.deployment, on_event))
        yield running.target.grpc_address
