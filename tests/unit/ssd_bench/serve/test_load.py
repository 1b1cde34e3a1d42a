"""Closed and open loops against clients without a network."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import cast

import pytest

from ssd.errors import DeadlineError, OverloadedError
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.telemetry import SystemClock
from ssd.types import FinishReason, GenerationChunk
from ssd_bench.serve import load
from ssd_bench.serve.load import LoadGenerator, send
from ssd_bench.serve.workload import Workload

WORKLOAD = Workload(prompts=("a", "b"), max_tokens=8)
MAX_SECONDS = 60.0


@dataclass
class FakeClient:
    """Returns two messages for each request, or an error for some."""

    errors: dict[int, Exception] = field(default_factory=dict)
    """By the seed of the request, which is its index."""
    is_stuck: bool = False
    num_open: int = 0
    most_open: int = 0
    seeds: list[int] = field(default_factory=list)
    are_many_open: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        assert call.sampling.seed is not None
        self.seeds.append(call.sampling.seed)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if self.num_open == 100:
            self.are_many_open.set()
        try:
            await asyncio.sleep(0)
            if call.sampling.seed in self.errors:
                raise self.errors[call.sampling.seed]
            if self.is_stuck:
                await asyncio.Event().wait()
            yield GenerationChunk(token_ids=(1, 2))
            yield GenerationChunk(token_ids=(3,), finish_reason=FinishReason.LENGTH)
        finally:
            self.num_open -= 1


def generator(*clients: FakeClient) -> LoadGenerator:
    return LoadGenerator(cast(tuple[TargetClient, ...], clients), SystemClock())


async def test_a_closed_loop_keeps_as_many_requests_open_as_it_has_streams() -> None:
    clients = FakeClient(), FakeClient()
    found = await generator(*clients).closed_loop(WORKLOAD, streams=3, seconds=0.05)
    assert sum(each.most_open for each in clients) <= 2 * 3
    assert len(found.records) > 3
    assert {each.outcome for each in found.records} == {"length"}
    seeds = [seed for each in clients for seed in each.seeds]
    assert sorted(seeds) == list(range(len(seeds)))


async def test_a_record_has_the_time_and_the_tokens_of_each_message() -> None:
    clock = SystemClock()
    found = await send(cast(TargetClient, FakeClient()), WORKLOAD.call(0), clock)
    assert list(found.num_tokens) == [2, 1]
    assert list(found.token_ids) == [1, 2, 3]
    assert found.sent_at <= found.arrived_at[0] <= found.arrived_at[1] <= found.ended_at


async def test_errors_are_outcomes_and_a_refused_client_waits_as_it_is_told() -> None:
    refusal = OverloadedError("full", retry_after_seconds=30.0)
    client = FakeClient(errors={0: refusal, 1: DeadlineError("too late")})
    found = await generator(client).closed_loop(WORKLOAD, streams=2, seconds=0.25)
    refused, late, *others = found.records
    assert (refused.outcome, refused.retry_after_seconds) == ("RESOURCE_EXHAUSTED", 30.0)
    assert (late.outcome, late.message) == ("DEADLINE_EXCEEDED", "too late")
    assert {each.outcome for each in others} == {"length"}


async def test_an_open_loop_sends_at_its_rate_whatever_is_open() -> None:
    client = FakeClient(is_stuck=True)
    loading = asyncio.create_task(generator(client).open_loop(WORKLOAD, rate=2_000.0, seconds=0.2))
    async with asyncio.timeout(MAX_SECONDS):
        await client.are_many_open.wait()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)


async def test_requests_that_do_not_end_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "END_SECONDS", 0.01)
    client = FakeClient(is_stuck=True)
    found = await generator(client).open_loop(WORKLOAD, rate=500.0, seconds=0.05)
    assert {each.outcome for each in found.records} == {load.UNFINISHED}
    assert client.num_open == 0


async def test_an_open_loop_bounds_the_requests_that_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "END_SECONDS", 0.01)
    monkeypatch.setattr(load, "MAX_OPEN", 3)
    found = await generator(FakeClient(is_stuck=True)).open_loop(WORKLOAD, rate=500, seconds=0.1)
    assert len(found.records) == 3
    assert found.num_unsent > 0


def test_no_two_prompts_of_a_workload_begin_alike_and_lengths_differ() -> None:
    calls = [WORKLOAD.call(index) for index in range(20)]
    assert len({str(call.prompt)[:4] for call in calls}) == 20
    assert {call.sampling.max_tokens for call in calls} == {4, 5, 6, 7, 8}
