"""A real target at its limits: deadlines, disconnected clients, full queues, outcomes."""

import asyncio
from pathlib import Path

import pytest
from tests.model_folders import model_folder
from tests.pairs import LONG_WAIT, QUICK, draft_of, target_of
from tests.processes import ProcessUnderTest
from tests.texts import read

from ssd.errors import (
    DeadlineError,
    NotReadyError,
    OverloadedError,
    PromptSizeError,
    RequestError,
)
from ssd.observability.metrics import OUTCOMES
from ssd.rpc.client import DraftClient
from ssd.rpc.codec import GenerateCall
from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd.types import FinishReason, Mode, SamplingParams

MAX_LEN = 20_000
SHAPE = (
    *("--dtype", "float32", "--lookahead", "3", "--branches", "8", "--max-model-len", str(MAX_LEN)),
    *("--kv-cache-bytes", "64000000", *QUICK),
)
WAIT_SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.7, seed=3, max_tokens=MAX_LEN - 100, ignore_eos=True)

Metrics = dict[str, float]
folder = model_folder(seed=1, max_len=MAX_LEN)


def is_free(metrics: Metrics) -> bool:
    return (
        metrics["ssd_running_sequences"] == metrics["ssd_waiting_sequences"] == 0
        and metrics['ssd_kv_blocks{state="used"}'] == 0
    )


def link_of(status: PoolStatus, process: ProcessUnderTest) -> LinkStatus:
    return next(link for link in status.links if link.address == process.grpc_address)


async def test_get_pool_status_reports_links_and_sequences(folder: Path) -> None:
    async with draft_of(folder, *SHAPE) as draft_process:
        unreachable = "127.0.0.1:1"
        flags = ("--drafts", f"{draft_process.grpc_address},{unreachable}", *LONG_WAIT)
        async with target_of(folder, *SHAPE, *flags) as (process, client):
            async with asyncio.timeout(WAIT_SECONDS):
                links: dict[str, LinkStatus] = {}
                while {"active", "lost"} != {link.state for link in links.values()}:
                    links = {link.address: link for link in (await client.pool_status()).links}
            assert links[unreachable].state == "lost"
            assert links[unreachable].reason
            # On a busy machine, tables are late and mode AUTO turns speculation off.
            call = GenerateCall(prompt="abc", sampling=ENDLESS, mode=Mode.SPECULATIVE)
            stream = client.generate(call)
            await anext(stream)
            async with asyncio.timeout(WAIT_SECONDS):
                while not (
                    (busy := await client.pool_status()).tokens_per_round > 1
                    and (link := link_of(busy, draft_process)).hits > 0
                    and link.sessions == 1
                ):
                    await anext(stream)
            assert (busy.running_sequences, busy.waiting_sequences) == (1, 0)
            assert (link.sessions, link.channel) == (1, "grpc")
            assert 1 <= link.sustainable_sessions <= 16
            assert 0 < busy.eligible_sequences <= 1
            assert 0 < busy.desired_draft_replicas <= 1
            assert 0 < (await process.metrics())["ssd_desired_draft_replicas"] <= 1
            assert (link.epoch > 0, link.reason) == (True, "")
            assert 0 < busy.hit_rate <= 1
            await stream.aclose()


async def test_a_request_that_exceeds_its_time_ends_with_the_reason(folder: Path) -> None:
    async with target_of(folder, *SHAPE, "--request-timeout-seconds", "1.5") as (process, client):
        with pytest.raises(DeadlineError, match=r"1\.5 s.*request_timeout_seconds"):
            async for _ in client.generate("abc", ENDLESS):
                pass
        await process.until_metrics(is_free)
        assert len((await read(client, "abc", GREEDY)).token_ids) == 24


async def test_a_disconnected_client_frees_the_sequence_and_the_session(folder: Path) -> None:
    async with (
        draft_of(folder, *SHAPE) as draft_process,
        target_of(folder, *SHAPE, *LONG_WAIT, drafts=[draft_process]) as (process, client),
        DraftClient(draft_process.grpc_address) as watcher,
    ):
        call = GenerateCall(prompt="abc", sampling=ENDLESS, mode=Mode.SPECULATIVE)
        stream = client.generate(call)
        await anext(stream)
        await process.until_metrics(lambda found: found["ssd_open_sessions"] == 1)
        async with asyncio.timeout(WAIT_SECONDS):
            while not (await watcher.get_status()).sessions:
                pass
        await stream.aclose()
        async with asyncio.timeout(WAIT_SECONDS):
            while (await watcher.get_status()).sessions:
                pass
        metrics = await process.until_metrics(is_free)
        assert metrics["ssd_open_sessions"] == 0
        assert metrics['ssd_requests_total{outcome="cancelled"}'] == 1


async def test_each_request_is_counted_once_with_its_outcome(folder: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-queue", "1")
    async with target_of(folder, *SHAPE, *flags) as (process, client):

        async def outcomes(**expected: int) -> None:
            total = sum(expected.values())
            names = {outcome: f'ssd_requests_total{{outcome="{outcome}"}}' for outcome in OUTCOMES}
            found = await process.until_metrics(
                lambda found: (
                    sum(found[each] for each in names.values()) == total
                    and found["ssd_waiting_sequences"] == 0
                )
            )
            counts = {outcome: found[name] for outcome, name in names.items()}
            assert {name: count for name, count in counts.items() if count} == expected

        assert (await read(client, "abc", GREEDY)).last.finish_reason is FinishReason.LENGTH
        for wrong in (SamplingParams(top_k=2**30), SamplingParams(max_tokens=MAX_LEN)):
            with pytest.raises(RequestError):
                await read(client, "abc", wrong)
        with pytest.raises(
            PromptSizeError, match=r"prompt is too long: the request has 2,\d+,\d+ bytes"
        ):
            await read(client, "x" * 2_000_000, GREEDY)
        await outcomes(length=1, invalid=3)

        stream = client.generate("abc", ENDLESS)
        await anext(stream)
        waiting = asyncio.create_task(read(client, "abc", GREEDY))
        await process.until_metrics(lambda found: found["ssd_waiting_sequences"] == 1)
        with pytest.raises(OverloadedError):
            await read(client, "one too many", GREEDY)
        waiting.cancel()
        await process.until_metrics(lambda found: found["ssd_waiting_sequences"] == 0)
        with pytest.raises(DeadlineError):
            await anext(client.generate("abc", ENDLESS, timeout_seconds=0.3))
        # Else the target may start it before it receives the end of the call.
        await process.until_metrics(lambda found: found["ssd_waiting_sequences"] == 0)
        await stream.aclose()
        await outcomes(length=1, invalid=3, overloaded=1, deadline=1, cancelled=2)

        stream = client.generate("abc", ENDLESS)
        await anext(stream)
        await client.drain(60_000)
        with pytest.raises(NotReadyError):
            await read(client, "x", GREEDY)
        await outcomes(length=1, invalid=3, overloaded=1, deadline=1, cancelled=2, unavailable=1)
        metrics = await process.metrics()
        assert metrics["ssd_time_to_first_token_seconds_count"] == 3, "two waited in vain"
        assert (metrics["ssd_e2e_seconds_count"], metrics["ssd_queue_seconds_count"]) == (1, 3)
        rounds = [metrics[f'ssd_rounds_total{{result="{kind}"}}'] for kind in ("none", "no_draft")]
        assert 0 < rounds[0] < rounds[1]
        await stream.aclose()
