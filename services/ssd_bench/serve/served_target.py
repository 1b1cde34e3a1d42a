"""A target under load: its connections, its metrics and its processes."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from ssd.launch import Deployment, deployed
from ssd.ports import Clock
from ssd.rpc.client import TargetClient
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials
from ssd.telemetry import SystemClock
from ssd_bench.scrape import samples, scrape
from ssd_bench.serve.load import LoadGenerator

NUM_CONNECTIONS = 4
"""Connections of the clients: thousands of streams on one would wait for its writer."""
SETTLE_SECONDS = 15.0
"""Maximum time after a load in which a target frees everything."""
_POLL_SECONDS = 0.1
_OF_TARGET = (
    *("ssd_running_sequences", "ssd_waiting_sequences", "ssd_open_sessions"),
    'ssd_kv_blocks{state="used"}',
)
_OF_DRAFT = ("ssd_draft_sessions",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTarget:
    """A running target. Asyncio loop."""

    clients: Sequence[TargetClient]
    http_address: str
    """Empty if it is unknown: then nothing is read from metrics."""
    draft_http_addresses: tuple[str, ...] = ()
    pids: Mapping[str, int] = field(default_factory=dict)
    """Processes of this machine whose memory is recorded, by name."""
    clock: Clock = field(default_factory=SystemClock)

    @property
    def generator(self) -> LoadGenerator:
        """A load generator for this target."""
        return LoadGenerator(self.clients, self.clock)

    async def metrics(self) -> dict[str, float]:
        """Return the samples of the target's metrics page; none if its address is unknown."""
        return samples(await scrape(self.http_address)) if self.http_address else {}

    async def leftovers(self) -> dict[str, float]:
        """Return what the target and its drafts still hold although no request is open.

        Waits up to ``SETTLE_SECONDS`` until nothing is left.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while True:
                    if not await self._held():
                        return {}
                    await asyncio.sleep(_POLL_SECONDS)
        return await self._held()

    async def _held(self) -> dict[str, float]:
        found = await self.metrics()
        held = {name: found[name] for name in _OF_TARGET if found.get(name)}
        for address in self.draft_http_addresses:
            there = samples(await scrape(address))
            held |= {f"{name} of {address}": there[name] for name in _OF_DRAFT if there.get(name)}
        return held


@contextlib.asynccontextmanager
async def started(deployment: Deployment) -> AsyncIterator[ServedTarget]:
    """Start a target and its drafts; stop them afterwards.

    This process moves to the CPUs that run no model.

    Raises:
        SSDError: a process cannot start.
    """
    allowed = os.sched_getaffinity(0)
    async with deployed(deployment) as running, contextlib.AsyncExitStack() as stack:
        os.sched_setaffinity(0, {int(cpu) for cpu in deployment.plan().others.split(",")})
        stack.callback(os.sched_setaffinity, 0, allowed)
        drafts = running.drafts
        yield ServedTarget(
            clients=await _connect(running.target.grpc_address, stack),
            http_address=running.target.http_address,
            draft_http_addresses=tuple(draft.http_address for draft in drafts),
            pids={
                "target": running.target.pid,
                **{draft.name: draft.pid for draft in drafts},
                "load generator": os.getpid(),
            },
        )


@contextlib.asynccontextmanager
async def connected(
    address: str, http_address: str, credentials: ClientCredentials
) -> AsyncIterator[ServedTarget]:
    """Use a target that runs already.

    Raises:
        NotReadyError: it does not serve.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = await _connect(address, stack, credentials)
        await clients[0].model_info()
        yield ServedTarget(clients=clients, http_address=http_address)


async def _connect(
    address: str,
    stack: contextlib.AsyncExitStack,
    credentials: ClientCredentials = NO_CREDENTIALS,
) -> Sequence[TargetClient]:
    return [
        await stack.enter_async_context(
            TargetClient(address, credentials=credentials, ready_seconds=0)
        )
        for _ in range(NUM_CONNECTIONS)
    ]
