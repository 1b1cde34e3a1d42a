"""Sends requests to a target and records when their tokens arrive.

A closed loop has a number of clients; each sends its next request when the previous one has ended.
An open loop sends requests at a rate, whether or not earlier ones have ended.
"""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ssd.errors import SSDError
from ssd.ports import Clock
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.rpc.status import retry_after_seconds, rule_of
from ssd.types import FinishReason, SpeculationStatistics
from ssd_bench.serve.workload import Workload

END_SECONDS = 180.0
"""Maximum time that requests continue after the last one was sent. Later ones are cancelled and
have the outcome ``UNFINISHED``."""
UNFINISHED = "UNFINISHED"
MAX_OPEN = 20_000
"""Maximum number of requests of an open loop that have not ended; further ones are not sent."""
_LAG_SECONDS = 0.02
"""Interval at which the delay of this process's event loop is measured."""
COMPLETE = (FinishReason.STOP.value, FinishReason.LENGTH.value)
"""Outcomes of requests that ended as requested."""


@dataclass(slots=True)
class RequestRecord:
    """What a client measured of one request. Times are those of the clock of the load."""

    sent_at: float
    outcome: str = UNFINISHED
    """Finish reason, or the name of the gRPC code of the error."""
    message: str = ""
    """Of the error."""
    retry_after_seconds: float | None = None
    ended_at: float = 0.0
    arrived_at: "array[float]" = field(default_factory=lambda: array("d"))
    """Of each message with tokens."""
    num_tokens: "array[int]" = field(default_factory=lambda: array("l"))
    """Of each message with tokens."""
    token_ids: "array[int]" = field(default_factory=lambda: array("l"))
    statistics: SpeculationStatistics | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it ended as requested."""
        return self.outcome in COMPLETE


@dataclass(slots=True)
class Load:
    """The requests of one load."""

    begun_at: float
    """Begin of the window that is measured."""
    ended_at: float
    """End of the window, after which no request is sent."""
    records: list[RequestRecord]
    lag_seconds: "array[float]"
    """Delays of the event loop of this process, which are part of every time."""
    num_unsent: int = 0
    """Requests of an open loop that were not sent because ``MAX_OPEN`` were open."""


async def send(client: TargetClient, call: GenerateCall, clock: Clock) -> RequestRecord:
    """Run one request and return its record. Errors of the call are outcomes."""
    record = RequestRecord(sent_at=clock.now())
    await _run(client, call, clock, record)
    return record


async def _run(
    client: TargetClient, call: GenerateCall, clock: Clock, record: RequestRecord
) -> None:
    try:
        async for chunk in client.generate(call):
            if chunk.token_ids:
                record.arrived_at.append(clock.now())
                record.num_tokens.append(len(chunk.token_ids))
                record.token_ids.extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                record.outcome = chunk.finish_reason.value
                record.statistics = chunk.statistics
    except SSDError as error:
        record.outcome = rule_of(error).code.name
        record.message = str(error)
        record.retry_after_seconds = retry_after_seconds(error)
    record.ended_at = clock.now()


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """Sends a workload over some connections. Asyncio loop."""

    clients: Sequence[TargetClient]
    """Each has its own connection; requests rotate over them."""
    clock: Clock

    async def closed_loop(
        self,
        workload: Workload,
        *,
        streams: int,
        seconds: float,
        warm_up_seconds: float = 0.0,
        first: int = 0,
    ) -> Load:
        """Keep ``streams`` requests open.

        A refused client waits for the retry time of the refusal, then continues.

        Args:
            workload: what is sent.
            streams: number of clients.
            seconds: duration of the window.
            warm_up_seconds: time before the window, in which requests run but do not count.
            first: index of the first request.
        """
        load = self._load(warm_up_seconds, seconds)
        indices = iter(range(first, 1 << 62))

        async def stream() -> None:
            while self.clock.now() < load.ended_at:
                index = next(indices)
                client = self.clients[index % len(self.clients)]
                record = RequestRecord(sent_at=self.clock.now())
                load.records.append(record)
                await _run(client, workload.call(index), self.clock, record)
                left = load.ended_at - self.clock.now()
                if not record.is_complete and left > 0:
                    await asyncio.sleep(min(record.retry_after_seconds or 0.1, left))

        async with self._measured_lag(load):
            await _finish([asyncio.create_task(stream()) for _ in range(streams)], load, self.clock)
        return load

    async def open_loop(
        self,
        workload: Workload,
        *,
        rate: float,
        seconds: float,
        warm_up_seconds: float = 0.0,
        first: int = 0,
    ) -> Load:
        """Send ``rate`` requests per second, at the times of a Poisson process.

        The arguments are those of ``closed_loop``.
        """
        load = self._load(warm_up_seconds, seconds)
        random = np.random.default_rng(first)
        due_at, index = self.clock.now(), first
        running: set[asyncio.Task[None]] = set()
        async with self._measured_lag(load):
            while (due_at := due_at + random.exponential(1 / rate)) < load.ended_at:
                # A late generator sends the missed requests at once, so the rate stays.
                await asyncio.sleep(max(0.0, due_at - self.clock.now()))
                if len(running) >= MAX_OPEN:
                    load.num_unsent += 1
                    continue
                record = RequestRecord(sent_at=self.clock.now())
                load.records.append(record)
                client = self.clients[index % len(self.clients)]
                task = asyncio.create_task(_run(client, workload.call(index), self.clock, record))
                running.add(task)
                task.add_done_callback(running.discard)
                index += 1
            await _finish(list(running), load, self.clock)
        return load

    def _load(self, warm_up_seconds: float, seconds: float) -> Load:
        begun_at = self.clock.now() + warm_up_seconds
        return Load(begun_at, begun_at + seconds, [], array("d"))

    @contextlib.asynccontextmanager
    async def _measured_lag(self, load: Load) -> AsyncIterator[None]:
        async def measure() -> None:
            while True:
                asleep_at = self.clock.now()
                await asyncio.sleep(_LAG_SECONDS)
                load.lag_seconds.append(self.clock.now() - asleep_at - _LAG_SECONDS)

        measuring = asyncio.create_task(measure())
        try:
            yield
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)


async def _finish(tasks: list["asyncio.Task[None]"], load: Load, clock: Clock) -> None:
    """Wait for all requests; cancel those that do not end.

    Raises:
        Exception: a bug of the load generator.
    """
    if not tasks:
        return
    left = load.ended_at - clock.now() + END_SECONDS
    done, late = await asyncio.wait(tasks, timeout=left)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
