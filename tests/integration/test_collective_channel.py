"""Frames over gloo: real processes, killed, stopped and without the channel."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from tests.integration.test_target_drafts import (
    GAIN,
    SHAPE,
    TARGET,
    generate,
    generate_until_hits,
    until_link,
)
from tests.model_folders import model_folder
from tests.pairs import LONG_WAIT, draft_of, target_of
from tests.ports import free_port
from tests.processes import ProcessUnderTest, running_code

from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.pool_codec import LinkStatus
from ssd.types import Mode

CHANNEL = ("--channel", "collective")
FLAGS = (*TARGET, *LONG_WAIT, *CHANNEL)
MAX_SECONDS = 60.0
LONGEST_LIFE_SECONDS = 1.5
"""A process is killed within this time: before, during or after the set-up of its channel."""
KILLS = [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
"""Kills of each side."""
WITHOUT_GLOO = """
import runpy
from ssd.errors import LinkError
from ssd.transport import gloo

def connect(store, place):
    raise LinkError("gloo does not connect: no such interface")

gloo.connect = connect
runpy.run_module("ssd_draft", run_name="__main__", alter_sys=True)
"""
folder = model_folder(seed=1, attention_gain=GAIN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[tuple[ProcessUnderTest, ProcessUnderTest]]:
    """A target and its draft."""
    async with (
        draft_of(folder, *SHAPE, *CHANNEL) as draft_process,
        target_of(folder, *FLAGS, drafts=[draft_process]) as (process, _),
    ):
        yield process, draft_process


@pytest.fixture
async def client(pair: tuple[ProcessUnderTest, ProcessUnderTest]) -> AsyncIterator[TargetClient]:
    async with TargetClient(pair[0].grpc_address) as client:
        yield client


async def only_link(client: TargetClient) -> LinkStatus:
    (link,) = (await client.pool_status()).links
    return link


def held(process: ProcessUnderTest) -> Counter[str]:
    """Return the numbers of a process's threads by name and of its descriptors by kind.

    gRPC starts threads for its event engine when the machine is busy, and keeps them.
    """
    of_process = Path("/proc") / str(process.pid)
    found: Counter[str] = Counter()
    for each in (*(of_process / "task").iterdir(), *(of_process / "fd").iterdir()):
        with suppress(FileNotFoundError):
            name = (
                str(each.readlink()).partition(":")[0]
                if each.is_symlink()
                else (each / "comm").read_text().strip()
            )
            found[name] += name != "event_engine"
    return found


async def until(is_true: Callable[[], Awaitable[bool]], seconds: float = MAX_SECONDS) -> None:
    """Ask a process until an answer is true."""
    async with asyncio.timeout(seconds):
        while not await is_true():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.05)


async def until_held(process: ProcessUnderTest, before: Counter[str]) -> None:
    """Wait until a process has no more threads and descriptors than before."""

    async def is_released() -> bool:
        return held(process) <= before

    try:
        await until(is_released, MAX_SECONDS / 2)
    except TimeoutError as error:
        raise AssertionError(f"it still has {held(process) - before}") from error


async def test_a_collective_channel_gives_the_tokens_of_plain_decoding_with_hits(
    client: TargetClient,
) -> None:
    plain, _ = await generate(client, Mode.AUTOREGRESSIVE)
    await generate_until_hits(client, plain, more_than=20)
    several = await asyncio.gather(*(generate(client, prompt=f"text {n}") for n in range(4)))
    alone = [await generate(client, Mode.AUTOREGRESSIVE, f"text {n}") for n in range(4)]
    assert [tokens for tokens, _ in several] == [tokens for tokens, _ in alone]


async def test_the_status_names_the_channel_its_transport_and_its_measurement(
    client: TargetClient,
) -> None:
    link = await only_link(client)
    assert (link.channel, link.transport, link.channel_reason) == ("collective", "tcp", "")
    assert 0.0 < link.channel_round_trip_seconds < 1.0
    assert link.channel_bytes_per_second > 1e6


async def test_a_stopped_draft_is_lost_with_its_lease_and_joins_again_in_a_new_epoch(
    pair: tuple[ProcessUnderTest, ProcessUnderTest], client: TargetClient
) -> None:
    process, twin = pair
    plain, _ = await generate(client, Mode.AUTOREGRESSIVE)
    epoch, before = (await only_link(client)).epoch, held(process)
    twin.signal(signal.SIGSTOP)
    async with asyncio.timeout(MAX_SECONDS):
        assert (await generate(client))[0] == plain
    await until_link(process, "lost")
    twin.signal(signal.SIGCONT)
    await until_link(process, "active")
    await generate_until_hits(client, plain)
    link = await only_link(client)
    assert (link.channel, link.epoch > epoch) == ("collective", True)
    # gRPC itself keeps a connection to a process that was stopped.
    await until_held(process, before | Counter(socket=held(process)["socket"]))


async def test_a_link_uses_grpc_if_its_draft_cannot_set_up_the_channel(folder: Path) -> None:
    shape = ("--model", str(folder), *SHAPE, *CHANNEL, "--port", "0")
    async with running_code(WITHOUT_GLOO, *shape) as draft_process:
        await draft_process.until("ready")
        async with target_of(folder, *FLAGS, drafts=[draft_process]) as (process, client):
            link = await only_link(client)
            assert (link.state, link.channel, link.transport) == ("active", "grpc", "tcp")
            assert link.channel_reason == "the draft: gloo does not connect: no such interface"
            logged = next(each for each in process.events if each.name == "channel")
            assert logged.fields["reason"] == link.channel_reason
            plain, _ = await generate(client, Mode.AUTOREGRESSIVE)
            await generate_until_hits(client, plain)


async def test_a_target_cannot_switch_the_channel_on_at_a_draft(folder: Path) -> None:
    async with (
        draft_of(folder, *SHAPE) as draft_process,
        target_of(folder, *FLAGS, drafts=[draft_process]) as (_, client),
    ):
        link = await only_link(client)
        assert (link.state, link.channel) == ("active", "grpc")
        assert link.channel_reason == (
            "the draft has channel grpc: set channel to collective on the draft too"
        )


@pytest.mark.parametrize("num_kills", KILLS)
async def test_drafts_killed_at_any_moment_change_no_token_and_leave_nothing(
    folder: Path, num_kills: int
) -> None:
    moments, port = random.Random(1), free_port()
    flags = (*SHAPE, *CHANNEL, "--port", str(port))
    before: Counter[str] = Counter()
    address = f"127.0.0.1:{port}"
    async with target_of(folder, *FLAGS, "--drafts", address) as (process, client):
        plain, _ = await generate(client, Mode.AUTOREGRESSIVE)

        async def is_active() -> bool:
            return (await only_link(client)).state == "active"

        for number in range(num_kills + 1):
            async with draft_of(folder, *flags) as victim, asyncio.timeout(MAX_SECONDS):
                if number in {0, num_kills}:
                    await until(is_active)
                    assert (await only_link(client)).channel == "collective"
                    await generate_until_hits(client, plain)
                    before = before or held(process)
                    await until_held(process, before)
                answer = asyncio.create_task(generate(client))
                await asyncio.sleep(moments.uniform(0.0, LONGEST_LIFE_SECONDS))
                victim.signal(signal.SIGKILL)
                assert (await answer)[0] == plain


@pytest.mark.parametrize("num_kills", KILLS)
async def test_targets_killed_at_any_moment_leave_nothing_on_their_draft(
    folder: Path,
    pair: tuple[ProcessUnderTest, ProcessUnderTest],
    client: TargetClient,
    num_kills: int,
) -> None:
    moments, draft_process = random.Random(2), pair[1]
    plain, _ = await generate(client, Mode.AUTOREGRESSIVE)
    await generate_until_hits(client, plain)
    before = held(draft_process)
    flags = (*FLAGS, "--drafts", draft_process.grpc_address)
    for _ in range(num_kills):
        async with target_of(folder, *flags) as (victim, other), asyncio.timeout(MAX_SECONDS):
            answer = asyncio.create_task(generate(other))
            await asyncio.sleep(moments.uniform(0.0, LONGEST_LIFE_SECONDS))
            victim.signal(signal.SIGKILL)
            await asyncio.gather(answer, return_exceptions=True)
    async with DraftClient(draft_process.grpc_address) as admin:

        async def has_only_the_link_of_the_pair() -> bool:
            return (await admin.get_status()).links == 1

        await until(has_only_the_link_of_the_pair)
    await until_held(draft_process, before)
    await generate_until_hits(client, plain)
