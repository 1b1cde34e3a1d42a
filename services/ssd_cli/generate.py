"""``ssd generate``: one continuation, from a running target or from one started for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ssd.launch import Deployment, deployed
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd_cli.display import startup_progress
from ssd_cli.figures import Collector, Generation

POLL_SECONDS = 0.05


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
            await linked(running.target.grpc_address, len(running.drafts))
        yield running.target.grpc_address


async def linked(endpoint: str, num_drafts: int, timeout_seconds: float = 10.0) -> None:
    """Wait until a target's drafts are linked; a first request should meet them.

    Drafts are an accelerator: when they do not come, the wait just ends.
    """
    async with TargetClient(endpoint) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                # The links belong to another process: there is no event to wait on.
                while (await client.model_info()).active_drafts < num_drafts:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
