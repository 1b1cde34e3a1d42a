"""A target and real drafts over real gRPC: the tokens are those of plain decoding, always."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from ssd.rpc.client import TargetClient
from ssd.testing.process import ProcessUnderTest, running
from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import Mode, SamplingParams, SpeculationStatistics

pytestmark = pytest.mark.timeout(120)
SHAPE = ("--dtype", "float32", "--lookahead", "3", "--branches", "8", "--http-port", "0")
TARGET = (*SHAPE, "--port", "0", "--max-num-seqs", "4", "--deterministic")
WARM = SamplingParams(temperature=0.7, seed=2**63 + 5, max_tokens=150, ignore_eos=True)
PATIENT = ("--draft-deadline-ms", "10000", "--no-adaptive-deadline", "--no-quarantine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("pair"), seed=1)


@asynccontextmanager
async def draft(folder: Path, port: str = "0") -> AsyncIterator[ProcessUnderTest]:
    async with running("ssd_draft", "--model", str(folder), *SHAPE, "--port", port) as process:
        await process.until("ready")
        yield process


@asynccontextmanager
async def target(
    folder: Path, drafts: list[ProcessUnderTest], *flags: str
) -> AsyncIterator[tuple[ProcessUnderTest, TargetClient]]:
    addresses = ",".join(each.grpc_address for each in drafts)
    arguments = ("--model", str(folder), *TARGET, "--drafts", addresses, *flags)
    async with running("ssd_target", *arguments) as process:
        await process.until("ready")
        for _ in drafts:
            assert (await process.until("link")).fields["state"] == "active"
        async with TargetClient(process.grpc_address) as client:
            yield process, client


async def until_link(process: ProcessUnderTest, state: str) -> None:
    while (await process.until("link")).fields["state"] != state:
        pass


async def ask(
    client: TargetClient, mode: Mode = Mode.AUTO, prompt: str = "some text"
) -> tuple[list[int], SpeculationStatistics]:
    tokens: list[int] = []
    statistics = None
    async for chunk in client.generate(prompt, WARM, mode):
        tokens += chunk.token_ids
        statistics = chunk.statistics or statistics
    assert statistics is not None
    return tokens, statistics


async def test_a_draft_that_is_the_target_never_misses_and_is_always_accepted(folder: Path) -> None:
    async with draft(folder) as helper, target(folder, [helper], *PATIENT) as (_, client):
        plain, statistics = await ask(client, Mode.AUTOREGRESSIVE)
        assert statistics.hits == 0
        tokens, statistics = await ask(client)
        assert tokens == plain
        assert (statistics.misses, statistics.late) == (0, 0)
        assert statistics.hits > 20
        assert statistics.accepted_tokens == statistics.proposed_tokens
        several = await asyncio.gather(*(ask(client, prompt=f"text {n}") for n in range(4)))
        for number, (tokens, _) in enumerate(several):
            alone, _ = await ask(client, Mode.AUTOREGRESSIVE, f"text {number}")
            assert tokens == alone


async def test_a_killed_draft_costs_no_token_and_its_sequences_move_on(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = [await stack.enter_async_context(draft(folder)) for _ in range(2)]
        process, client = await stack.enter_async_context(target(folder, pair, *PATIENT))
        plain, _ = await ask(client, Mode.AUTOREGRESSIVE)
        for victim in pair:
            running_on = [asyncio.create_task(ask(client)) for _ in range(4)]
            await asyncio.sleep(0.15)
            victim.signal(signal.SIGKILL)
            answers = await asyncio.gather(*running_on)
            assert all(tokens == plain for tokens, _ in answers)
            await until_link(process, "lost")
        tokens, statistics = await ask(client)
        assert tokens == plain
        assert statistics.mode is Mode.AUTOREGRESSIVE


async def test_a_stopped_draft_is_given_up_and_taken_back_when_it_goes_on(folder: Path) -> None:
    async with draft(folder) as helper, target(folder, [helper]) as (process, client):
        plain, _ = await ask(client, Mode.AUTOREGRESSIVE)
        helper.signal(signal.SIGSTOP)
        async with asyncio.timeout(10):
            assert (await ask(client))[0] == plain
        await until_link(process, "lost")
        helper.signal(signal.SIGCONT)
        await until_link(process, "active")
        tokens, statistics = await ask(client)
        assert tokens == plain
        assert statistics.hits > 0


async def test_a_draft_that_is_started_later_is_found(folder: Path) -> None:
    async with draft(folder) as first:
        port = first.grpc_address.rpartition(":")[2]
        async with target(folder, [first], *PATIENT) as (process, client):
            first.signal(signal.SIGKILL)
            assert (await process.until("link")).fields["state"] == "lost"
            async with draft(folder, port):
                await until_link(process, "active")
                assert (await client.model_info()).active_drafts == 1
                assert (await ask(client))[1].hits > 0
