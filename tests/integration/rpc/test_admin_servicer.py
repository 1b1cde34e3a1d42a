"""``AdminService``: the watched pool, changes of speculation, the drain."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.served import serving

from ssd.errors import FieldError, TooLargeError, UnsupportedError
from ssd.rpc.admin_servicer import AdminServicer, has_changed
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import SpeculationChange
from ssd.rpc.pool_codec import LinkStatus, PoolStatus, pool_status
from ssd.types import Mode
from ssd.v1 import admin_pb2

MAX_SECONDS = 60.0
LINK = LinkStatus(address="10.0.0.1:1", state="active", round_trip_seconds=0.001)
POOL = PoolStatus(links=(LINK,), running_sequences=1, desired_draft_replicas=0.4)


class Pool:
    """A pool whose state a test sets."""

    def __init__(self) -> None:
        self.status = POOL
        self.drained: list[float] = []
        self.changes: list[SpeculationChange] = []

    def read(self) -> PoolStatus:
        return self.status

    def drain(self, seconds: float) -> int:
        self.drained.append(seconds)
        return 3


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
async def admin(pool: Pool) -> AdminServicer:
    return AdminServicer(
        pool.read, set_speculation=pool.changes.append, drain=pool.drain, watch_seconds=0.001
    )


@pytest.fixture
async def client(admin: AdminServicer) -> AsyncIterator[TargetClient]:
    async with serving(admin) as server, TargetClient(f"127.0.0.1:{server.port}") as client:
        yield client
        admin.close()


async def test_a_watcher_receives_the_status_and_each_change(
    client: TargetClient, pool: Pool
) -> None:
    watched = client.watch_pool()
    async with asyncio.timeout(MAX_SECONDS):
        assert await anext(watched) == POOL
        changing = asyncio.ensure_future(anext(watched))
        pool.status = replace(POOL, running_sequences=2)
        assert await changing == pool.status
    await watched.aclose()


async def test_a_watcher_does_not_receive_an_unchanged_status() -> None:
    same = replace(POOL, links=(replace(LINK, round_trip_seconds=0.002),))
    changed = replace(POOL, running_sequences=2)
    statuses = iter([POOL, POOL, same, changed])
    admin = AdminServicer(
        lambda: next(statuses),
        set_speculation=lambda _change: None,
        drain=lambda _seconds: 0,
        watch_seconds=0.0,
    )
    watched = admin.WatchPool(admin_pb2.WatchPoolRequest(), None)
    async with asyncio.timeout(MAX_SECONDS):
        received = [pool_status((await anext(watched)).pool) for _ in range(2)]
    assert received == [POOL, changed]


@pytest.mark.parametrize(
    ("change", "is_sent"),
    [
        ({"waiting_sequences": 1}, True),
        ({"hit_rate": 0.5}, True),
        ({"desired_draft_replicas": 1.2}, True),
        ({"links": (replace(LINK, state="draining"),)}, True),
        ({"links": (replace(LINK, round_trip_seconds=0.002),)}, False),
        ({"eligible_sequences": 0.5, "tokens_per_round": 3.0}, False),
        ({"efficiency": 0.8, "desired_draft_replicas": 0.5}, False),
    ],
)
def test_a_status_is_sent_again_unless_only_measurements_differ(
    change: dict[str, Any], *, is_sent: bool
) -> None:
    assert has_changed(replace(POOL, **change), POOL) is is_sent


async def test_a_status_that_is_too_long_is_refused_before_it_is_read(
    client: TargetClient, pool: Pool
) -> None:
    pool.status = replace(POOL, links=(replace(LINK, reason="x" * 1024),) * 300)
    with pytest.raises(TooLargeError, match=r"the answer has .* allowed are 262,144 bytes"):
        await client.pool_status()
    with pytest.raises(TooLargeError):
        await anext(client.watch_pool())


async def test_a_watch_ends_with_the_server(
    client: TargetClient, admin: AdminServicer, pool: Pool
) -> None:
    watched = client.watch_pool()
    async with asyncio.timeout(MAX_SECONDS):
        assert await anext(watched) == POOL
        admin.close()
        assert [status async for status in watched] == []


async def test_a_watch_ends_when_its_client_cancels(admin: AdminServicer, pool: Pool) -> None:
    watched = admin.WatchPool(admin_pb2.WatchPoolRequest(), None)
    await anext(watched)
    waiting = asyncio.ensure_future(anext(watched))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(watched)


async def test_a_drain_uses_the_deadline_and_returns_the_number_of_requests(
    client: TargetClient, pool: Pool
) -> None:
    assert await client.drain(1500) == 3
    assert pool.drained == [1.5]


async def test_a_drain_beyond_an_hour_is_refused(client: TargetClient, pool: Pool) -> None:
    with pytest.raises(FieldError, match=r"deadline_ms: is 3600001, must be in 0\.\.3600000"):
        await client.drain(3_600_001)
    assert pool.drained == []


async def test_a_change_of_speculation_reaches_the_target(client: TargetClient, pool: Pool) -> None:
    change = SpeculationChange(
        mode=Mode.SPECULATIVE, fan_out_policy="uniform", backup="none", draft_deadline_ms=7.5
    )
    await client.set_speculation(change)
    await client.set_speculation(SpeculationChange())
    assert pool.changes == [change, SpeculationChange()]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"fan_out_policy": "explicit"}, "fan_out_policy: is 'explicit', must be one of adaptive"),
        ({"backup": "draft"}, "backup: is 'draft', must be one of none, ngram"),
        ({"draft_deadline_ms": 0.0}, "draft_deadline_ms: is 0, must be above 0"),
        ({"draft_deadline_ms": 60_001.0}, "draft_deadline_ms: is 60001, must be above 0"),
        ({"draft_deadline_ms": float("nan")}, "draft_deadline_ms: is nan, must be above 0"),
        ({"mode": 77}, "mode: unknown value 77"),
    ],
)
async def test_a_change_of_speculation_out_of_bounds_is_refused(
    admin: AdminServicer, pool: Pool, request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        await admin.SetSpeculation(admin_pb2.SetSpeculationRequest(**request_), None)
    assert pool.changes == []


async def test_a_target_without_a_drain_says_so(pool: Pool) -> None:
    admin = AdminServicer(pool.read, set_speculation=pool.changes.append, drain=None)
    with pytest.raises(UnsupportedError, match="Drain: end vLLM by SIGTERM"):
        await admin.Drain(admin_pb2.DrainTargetRequest(), None)
