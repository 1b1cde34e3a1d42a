"""Targets and drafts of a model folder as processes under test, each on any free port."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.processes import ProcessUnderTest, running

from ssd.rpc.client import TargetClient
from ssd.runtime.launch import Deployment

ANY_PORT = ("--port", "0", "--http-port", "0")
LONG_WAIT = ("--draft-deadline-ms", "10000", "--no-adaptive-deadline", "--no-circuit-breaker")
"""Of a target: on a busy machine, no table is late."""
QUICK = ("--engine", "torch")
"""Of tests of links and processes: a tiny model is loaded in a tenth of the time of openvino."""


@asynccontextmanager
async def draft_of(model: Path | str, *flags: str) -> AsyncIterator[ProcessUnderTest]:
    """Run a draft; inside, it is ready."""
    async with running("ssd_draft", "--model", str(model), *ANY_PORT, *flags) as process:
        await process.until("ready")
        yield process


@asynccontextmanager
async def target_of(
    model: Path | str, *flags: str, drafts: Sequence[ProcessUnderTest] = ()
) -> AsyncIterator[tuple[ProcessUnderTest, TargetClient]]:
    """Run a target and a client of it; inside, it is ready and has linked its drafts."""
    links = ("--drafts", ",".join(each.grpc_address for each in drafts)) if drafts else ()
    arguments = ("--model", str(model), *ANY_PORT, *links, *flags)
    async with running("ssd_target", *arguments) as process:
        await process.until("ready")
        for _ in drafts:
            assert (await process.until("link")).fields["state"] == "active"
        async with TargetClient(process.grpc_address, ready_seconds=0) as client:
            yield process, client


@asynccontextmanager
async def deployed(deployment: Deployment, _on_event: object = None) -> AsyncIterator[Any]:
    """In place of ``ssd.runtime.launch.deployed``: the processes are forks, without imports."""
    common = deployment.common_flags
    own = ("--draft-model", deployment.draft) if deployment.is_synchronous else ()
    async with AsyncExitStack() as stack:
        drafts = [
            await stack.enter_async_context(
                draft_of(deployment.draft, *common, *deployment.draft_flags)
            )
            for _ in range(deployment.num_drafts)
        ]
        flags = (*own, *common, *deployment.target_flags)
        started = target_of(deployment.target, *flags, drafts=drafts)
        target, _ = await stack.enter_async_context(started)
        yield SimpleNamespace(target=target, drafts=drafts)


@asynccontextmanager
async def quickly_deployed(deployment: Deployment, _on_event: object = None) -> AsyncIterator[Any]:
    """``deployed`` with the engine of tests of links and processes."""
    quick = replace(deployment, common_flags=(*deployment.common_flags, *QUICK))
    async with deployed(quick) as found:
        yield found
