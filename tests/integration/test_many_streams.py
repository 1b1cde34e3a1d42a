"""Many streams on a real target with a draft: cancelled or read slowly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.integration.rpc.test_call_guard import WINDOW
from tests.model_folders import model_folder
from tests.pairs import draft_of, target_of
from tests.processes import ProcessUnderTest
from tests.texts import read

from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.codec import GenerateCall, generate_request
from ssd.types import SamplingParams
from ssd.v1 import generate_pb2_grpc

pytestmark = pytest.mark.soak

NUM_STREAMS = 500
NUM_SLOTS = 32
MAX_LEN = 4000
SHAPE = (
    *("--dtype", "float32", "--lookahead", "3", "--branches", "8", "--max-model-len", str(MAX_LEN)),
    *("--kv-cache-bytes", "256000000"),
)
WAIT_SECONDS = 120.0
ENDLESS = SamplingParams(temperature=0.7, seed=3, max_tokens=MAX_LEN - 100, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
folder = model_folder(seed=1, max_len=MAX_LEN)


@asynccontextmanager
async def pair(
    folder: Path, *flags: str
) -> AsyncIterator[tuple[ProcessUnderTest, ProcessUnderTest, TargetClient]]:
    sessions = ("--max-sessions", str(NUM_SLOTS))
    slots = ("--max-num-seqs", str(NUM_SLOTS), *flags)
    async with (
        draft_of(folder, *SHAPE, *sessions) as draft,
        target_of(folder, *SHAPE, *slots, drafts=[draft]) as (target, client),
    ):
        yield target, draft, client


async def test_500_cancelled_streams_leave_nothing_and_change_no_tokens(folder: Path) -> None:
    async with pair(folder, "--max-queue", str(NUM_STREAMS)) as (target, draft, client):
        alone = await read(client, "abc", GREEDY)
        streams = [
            asyncio.create_task(read(client, f"stream {n}", ENDLESS)) for n in range(NUM_STREAMS)
        ]
        # Not at the same time: on a busy machine the circuit breaker suspends the link at times.
        await target.until_metrics(lambda found: found["ssd_open_sessions"] > 0)
        await target.until_metrics(
            lambda found: (
                found["ssd_running_sequences"] == NUM_SLOTS
                and found["ssd_waiting_sequences"] == NUM_STREAMS - NUM_SLOTS
            )
        )
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await target.until_metrics(
            lambda found: (
                found["ssd_running_sequences"] == found["ssd_waiting_sequences"] == 0
                and found['ssd_kv_blocks{state="used"}'] == found["ssd_open_sessions"] == 0
                and found['ssd_requests_total{outcome="cancelled"}'] == NUM_STREAMS
            )
        )
        async with DraftClient(draft.grpc_address) as watcher, asyncio.timeout(WAIT_SECONDS):
            while (await watcher.get_status()).sessions:
                pass
        again = await read(client, "abc", GREEDY)
        assert again.token_ids == alone.token_ids


async def test_slow_readers_get_all_tokens_in_fewer_messages_and_delay_nobody(folder: Path) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=2_000, ignore_eos=True)
    # The target must not end a stream before the test reads it, on a slow machine either.
    stall = ("--stream-stall-seconds", "600")
    async with pair(folder, "--max-queue", "16", *stall) as (target, _draft, client):
        whole = await read(client, "abc", long)
        tokens = list(whole.token_ids)
        async with grpc.aio.insecure_channel(target.grpc_address, options=WINDOW) as channel:
            make: Any = generate_pb2_grpc.GenerateServiceStub
            call = GenerateCall(prompt="abc", sampling=long)
            slow = [make(channel).Generate(generate_request(call)) for _ in range(NUM_SLOTS - 1)]
            messages = [[await each.read()] for each in slow]
            # While nobody reads, the sequences run to their end and others are served.
            short = await read(client, "abc", GREEDY)
            assert list(short.token_ids) == tokens[: GREEDY.max_tokens]
            await target.until_metrics(lambda found: found["ssd_running_sequences"] == 0)
            for each, found in zip(slow, messages, strict=True):
                while message := await each.read():
                    found.append(message)
        for found in messages:
            assert [token for each in found for token in each.token_ids] == tokens
            assert len(found) < len(whole.chunks) / 4
