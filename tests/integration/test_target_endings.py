"""The end of a real target: SIGTERM or Drain while it loads or serves, and crashes."""

import asyncio
import re
import signal
from pathlib import Path

import pytest
from tests.model_folders import model_folder
from tests.pairs import ANY_PORT, QUICK, target_of
from tests.processes import running_code
from tests.texts import read

from ssd.errors import IncompleteTextError, InternalError, NotReadyError
from ssd.rpc.client import TargetClient
from ssd.types import FinishReason, SamplingParams

MAX_LEN = 4000
SHAPE = (
    *("--dtype", "float32", "--lookahead", "3", "--max-model-len", str(MAX_LEN)),
    *("--max-num-seqs", "4", "--kv-cache-bytes", "64000000", *QUICK),
)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=MAX_LEN - 100, ignore_eos=True)

BREAKS_AT_POSITION_60 = """
import sys
from ssd_target import __main__, step_thread

load = step_thread.load_runner

def load_what_breaks(*arguments):
    runner = load(*arguments)
    prepare = runner.prepare
    def prepare_until_60(batch):
        if int(batch.first_positions_B.max()) == 60:
            raise ZeroDivisionError("broken on purpose")
        return prepare(batch)
    runner.prepare = prepare_until_60
    return runner

step_thread.load_runner = load_what_breaks
sys.exit(__main__.main(sys.argv[1:]))
"""
folder = model_folder(seed=1, max_len=MAX_LEN)


async def test_a_crash_of_the_step_thread_fails_all_requests_and_ends_the_process(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    model = ("--model", str(folder), *ANY_PORT, *SHAPE)
    flags = (*model, "--max-num-seqs", "2", "--termination-log", str(log))
    async with running_code(BREAKS_AT_POSITION_60, *flags) as process:
        await process.until("ready")
        async with TargetClient(process.grpc_address, ready_seconds=0) as client:
            calls = [asyncio.create_task(read(client, f"call {n}", LONG)) for n in range(5)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                assert isinstance(result, InternalError | NotReadyError)
            assert any(isinstance(result, InternalError) for result in results)
            assert not any("broken on purpose" in str(result) for result in results)
        assert await process.wait() == 1
    failed = process.events[-1]
    assert (failed.name, failed.fields["error"]) == ("failed", "ZeroDivisionError")
    assert "broken on purpose" in failed.fields["stack"]
    place = r"ssd_target/[\w/]+\.py:\d+"
    assert re.fullmatch(rf"ZeroDivisionError: broken on purpose \({place}\)", log.read_text())


async def test_sigterm_finishes_running_streams_and_refuses_new_ones(folder: Path) -> None:
    async with target_of(folder, *SHAPE) as (process, client):
        streams = [client.generate(f"stream {n}", LONG) for n in range(3)]
        counts = [len((await anext(stream)).token_ids) for stream in streams]
        process.signal(signal.SIGTERM)
        assert (await process.until("draining")).fields["requests"] == 3
        # A second signal has no effect.
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGINT)
        with pytest.raises(NotReadyError, match="draining"):
            await read(client, "too late", LONG)
        assert await process.probe("/readyz") == (503, "draining\n")
        assert await process.probe("/livez") == (200, "live\n")
        for index, stream in enumerate(streams):
            async for chunk in stream:
                counts[index] += len(chunk.token_ids)
        assert counts == [300] * 3
        assert await process.wait() == 0


async def test_requests_that_exceed_the_drain_are_cancelled_with_the_reason(folder: Path) -> None:
    async with target_of(folder, *SHAPE, "--drain-seconds", "0.2") as (process, client):
        stream = client.generate("abc", ENDLESS)
        await anext(stream)
        process.signal(signal.SIGTERM)
        with pytest.raises(IncompleteTextError, match="because it stops or"):
            _ = [chunk async for chunk in stream]
        assert await process.wait() == 0


async def test_the_drain_rpc_acts_like_sigterm_and_watches_continue_until_the_end(
    folder: Path,
) -> None:
    async with target_of(folder, *SHAPE) as (process, client):
        statuses = client.watch_pool()
        assert (await anext(statuses)).running_sequences == 0
        stream = client.generate("abc", LONG)
        await anext(stream)
        assert await client.drain(60_000) == 1
        with pytest.raises(NotReadyError, match="draining"):
            await read(client, "too late", LONG)
        rest = [chunk async for chunk in stream]
        assert rest[-1].finish_reason is FinishReason.LENGTH
        _ = [status async for status in statuses]
        assert await process.wait() == 0
