"""Targets with several ranks, as processes under test."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.pairs import ANY_PORT, LONG_WAIT, QUICK, draft_of
from tests.processes import ProcessUnderTest, running
from tests.texts import read

from ssd.errors import SSDError
from ssd.observability.log import Event
from ssd.rpc.client import TargetClient
from ssd.testing.tiny_folder import write_tiny_folder, write_tiny_qwen3
from ssd.types import Mode, SamplingParams, TokenId

SHAPE = (
    *("--dtype", "float32", "--lookahead", "3", "--branches", "8", "--max-model-len", "256"),
    *(*ANY_PORT, "--prefill-chunk", "32"),
)
TARGET = ("--engine", "torch", "--max-num-seqs", "4", "--kv-cache-bytes", str(1 << 22))
PROMPTS = ("def fib(n):", "import os, sys")
TEMPERATURES = (0.0, 0.8)
END_SECONDS = 10.0
"""A target ends within this time after a rank has ended or hangs."""
WRITERS = {"llama": write_tiny_folder, "qwen3": write_tiny_qwen3}


def write_model(folder: Path, family: str) -> Path:
    """Write a model whose choices depend on its context."""
    return WRITERS[family](folder, seed=1, attention_gain=8)


def flags_of(folder: Path, size: int) -> tuple[str, ...]:
    """Return the flags of a target with some ranks."""
    return ("--model", str(folder), *SHAPE, *TARGET, "--tensor-parallel-size", str(size))


@asynccontextmanager
async def target(folder: Path, size: int, *flags: str) -> AsyncIterator[ProcessUnderTest]:
    """Run a target with some ranks."""
    async with running("ssd_target", *flags_of(folder, size), *flags) as process:
        yield process


@asynccontextmanager
async def linked_target(folder: Path, size: int, *flags: str) -> AsyncIterator[ProcessUnderTest]:
    """Run a target with some ranks that has a draft; inside, both are linked."""
    async with draft_of(folder, *SHAPE, *QUICK) as draft:
        drafts = ("--drafts", draft.grpc_address, *LONG_WAIT)
        async with target(folder, size, *drafts, *flags) as process:
            await process.until("ready")
            await process.until("link")
            yield process


async def texts(process: ProcessUnderTest, mode: Mode) -> tuple[list[tuple[TokenId, ...]], int]:
    """Tokens of all prompts at all temperatures, generated together, and the number of hits."""
    samplings = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=40, ignore_eos=True)
        for temperature in TEMPERATURES
    ]
    async with TargetClient(process.grpc_address, ready_seconds=0) as client:
        found = await asyncio.gather(
            *(read(client, prompt, each, mode) for prompt in PROMPTS for each in samplings)
        )
    return [each.token_ids for each in found], sum(each.statistics.hits for each in found)


async def texts_of_one_rank(folder: Path, *flags: str) -> list[tuple[TokenId, ...]]:
    """Tokens of a target that is not split, without a draft."""
    async with target(folder, 1, *flags) as process:
        await process.until("ready")
        return (await texts(process, Mode.AUTOREGRESSIVE))[0]


async def assert_tokens(process: ProcessUnderTest, expected: list[tuple[TokenId, ...]]) -> None:
    """Compare plain decoding and speculation of a linked target with the expected tokens."""
    plain, _ = await texts(process, Mode.AUTOREGRESSIVE)
    assert plain == expected
    speculative, hits = await texts(process, Mode.SPECULATIVE)
    assert speculative == expected
    assert hits > 0


async def generate_until_the_end(process: ProcessUnderTest) -> SSDError:
    """Keep a target busy until it ends; return the error of a request that ran at the end."""
    while True:
        try:
            await texts(process, Mode.AUTO)
        except SSDError as error:
            return error


async def until_running(process: ProcessUnderTest) -> None:
    """Wait until a target runs a request."""
    await process.until_metrics(lambda found: found["ssd_running_sequences"] > 0)


def pids_of(process: ProcessUnderTest) -> dict[int, int]:
    """Process id of each rank that has been started, by its number."""
    started = [event.fields for event in process.events if event.name == "rank_started"]
    return {int(each["rank"]): int(each["pid"]) for each in started}


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def ended(pids: Iterable[int]) -> None:
    """Wait until other processes, which send no event, have ended."""
    async with asyncio.timeout(END_SECONDS):
        while any(map(runs, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def failure(process: ProcessUnderTest) -> Event:
    """Wait for the end of a target that has lost a rank; returns its last event."""
    async with asyncio.timeout(END_SECONDS):
        assert await process.wait() != 0
    await ended(pids_of(process).values())
    assert process.events[-1].name == "failed"
    return process.events[-1]
