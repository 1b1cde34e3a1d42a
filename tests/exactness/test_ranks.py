"""Targets with several ranks: the tokens of one rank, and a bounded end on every failure of a rank.

``make exactness``. ``tests/integration/test_tensor_parallel.py`` is the part of ``make test``.
"""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.processes import running_code
from tests.split_targets import (
    assert_tokens,
    ended,
    failure,
    flags_of,
    generate_until_the_end,
    linked_target,
    pids_of,
    target,
    texts,
    texts_of_one_rank,
    write_model,
)

from ssd.rpc.client import TargetClient
from ssd.types import Mode, SamplingParams

NUM_KILLS = 40
LONGEST_START_SECONDS = 6.0
LONGEST_SERVICE_SECONDS = 0.5
TARGET_THAT_NEVER_ENDS = """
import runpy, threading
threading.Thread(target=threading.Event().wait).start()
runpy.run_module("ssd_target", run_name="__main__", alter_sys=True)
"""
"""As the interpreter, the end of this process waits for a thread that never ends."""
RANK_0_HANGS_IN_ITS_OWN_WORK = """
import runpy, threading
from ssd_target import rank_processes
from ssd_target.decoding.decode_loop import DecodeLoop

rank_processes.STEP_SECONDS = 2.0
DecodeLoop._conclude = lambda *_arguments: threading.Event().wait()
runpy.run_module("ssd_target", run_name="__main__", alter_sys=True)
"""
"""As a GPU would let it wait: no collective of another rank waits for it."""
RANKS_OF_THE_FOLDER = """
import os, runpy, sys
os.environ["PYTHONPATH"] = sys.argv.pop()
runpy.run_module("ssd_target", run_name="__main__", alter_sys=True)
"""
RANK_HANGS_AFTER_ITS_LAST_COLLECTIVE = """
import sys, threading
if "ssd_target.rank" in sys.orig_argv:
    from ssd.engine import rank_loop
    from ssd.engine.parallel import group
    group.STEP_DEADLINES = 0.4
    choose = rank_loop.choose_of_ranks

    def choose_and_hang(scores_R, ids_R, ranks):
        choose(scores_R, ids_R, ranks)
        if ranks.deadline_seconds < group.START_SECONDS:
            threading.Event().wait()

    rank_loop.choose_of_ranks = choose_and_hang
"""
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", ["torch", "static"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_four_ranks_select_the_tokens_of_one(
    tmp_path: Path, family: str, engine: str
) -> None:
    folder = write_model(tmp_path / "model", family)
    expected = await texts_of_one_rank(folder, "--engine", engine)
    async with linked_target(folder, 4, "--engine", engine) as process:
        await assert_tokens(process, expected)


async def test_a_draft_in_the_process_of_rank_0_changes_no_token(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    expected = await texts_of_one_rank(folder)
    async with target(folder, 2, "--draft-model", str(folder)) as process:
        await process.until("ready")
        found, _ = await texts(process, Mode.SYNCHRONOUS)
        assert found == expected


@pytest.mark.parametrize("hanging", [1, 2, 3])
async def test_a_rank_that_hangs_ends_the_target_which_names_it(
    tmp_path: Path, hanging: int
) -> None:
    async with target(write_model(tmp_path / "model", "llama"), 4) as process:
        await process.until("ready")
        os.kill(pids_of(process)[hanging], signal.SIGSTOP)
        load = asyncio.create_task(generate_until_the_end(process))
        message = (await failure(process)).fields["message"]
        assert message == f"rank {hanging} does not answer the other ranks"
        assert f"the target ends: {message}" in str(await load)


async def test_rank_0_that_hangs_in_its_own_work_ends_the_target_which_names_it(
    tmp_path: Path,
) -> None:
    flags = flags_of(write_model(tmp_path / "model", "llama"), 2)
    async with running_code(RANK_0_HANGS_IN_ITS_OWN_WORK, *flags) as process:
        await process.until("ready")
        load = asyncio.create_task(generate_until_the_end(process))
        message = (await failure(process)).fields["message"]
        assert message == "rank 0 hangs: it did not end a step within 2 s"
        assert f"the target ends: {message}" in str(await load)


async def test_a_rank_that_hangs_while_no_other_waits_for_it_ends_the_target(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RANK_HANGS_AFTER_ITS_LAST_COLLECTIVE)
    flags = flags_of(write_model(tmp_path / "model", "llama"), 2)
    async with running_code(RANKS_OF_THE_FOLDER, *flags, str(tmp_path)) as process:
        await process.until("ready")
        async with TargetClient(process.grpc_address, ready_seconds=0) as client:
            sampling = SamplingParams(temperature=0.0, max_tokens=1)
            async for _ in client.generate("x", sampling, Mode.AUTOREGRESSIVE):
                pass
        message = str((await failure(process)).fields["message"])
        assert message.startswith("rank 1 hangs: it did not end a step within")


async def test_a_target_whose_end_hangs_ends_nevertheless(tmp_path: Path) -> None:
    flags = flags_of(write_model(tmp_path / "model", "llama"), 2)
    async with running_code(TARGET_THAT_NEVER_ENDS, *flags) as process:
        await process.until("ready")
        os.kill(pids_of(process)[1], signal.SIGKILL)
        message = str((await failure(process)).fields["message"])
        assert message.startswith("rank 1 was killed")


async def test_ranks_end_with_a_killed_target_even_if_they_are_stopped(tmp_path: Path) -> None:
    async with target(write_model(tmp_path / "model", "llama"), 2) as process:
        await process.until("ready")
        pids = pids_of(process)
        os.kill(pids[1], signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        await process.wait()
        await ended(pids.values())


async def test_a_drained_target_ends_its_ranks(tmp_path: Path) -> None:
    async with target(write_model(tmp_path / "model", "llama"), 2) as process:
        await process.until("ready")
        process.signal(signal.SIGTERM)
        assert await process.wait() == 0
        await ended(pids_of(process).values())


async def test_a_rank_that_cannot_load_its_part_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    weights["model.layers.1.mlp.up_proj.weight"][-1, 0] = float("nan")
    save_file(weights, path)
    async with target(folder, 2) as process:
        last = await failure(process)
        assert last.fields["error"] == "WeightsError"
        assert str(last.fields["message"]).startswith("rank 1: ")
        assert "up_proj.weight contains NaN" in str(last.fields["message"])
        assert await process.wait() == os.EX_CONFIG


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
async def test_a_device_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    async with target(folder, 2, "--engine", "static", "--device", "cuda") as process:
        last = await failure(process)
        assert last.fields["error"] == "SettingsError"
        assert "cannot be used here" in str(last.fields["message"])


@pytest.mark.timeout(1800)
async def test_a_rank_killed_or_stopped_at_a_random_moment_ends_the_target(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    chance = random.Random(5)
    for index in range(NUM_KILLS):
        size = chance.choice((2, 4))
        victim, is_ready = chance.randrange(size), chance.random() < 0.6
        pause = chance.uniform(0, LONGEST_SERVICE_SECONDS if is_ready else LONGEST_START_SECONDS)
        async with target(folder, size) as process:
            while len(pids_of(process)) < size - 1:
                await process.until("rank_started")
            if is_ready:
                await process.until("ready")
            load = asyncio.create_task(generate_until_the_end(process) if is_ready else nothing())
            await asyncio.sleep(pause)
            if victim == 0:
                process.signal(signal.SIGKILL)
                await process.wait()
                await ended(pids_of(process).values())
            else:
                hangs = is_ready and chance.random() < 0.3
                number = signal.SIGSTOP if hangs else signal.SIGKILL
                os.kill(pids_of(process)[victim], number)
                message = str((await failure(process)).fields["message"])
                cause = "does not answer" if hangs else "was killed"
                assert message.startswith(f"rank {victim} {cause}"), (index, message)
            await load


async def nothing() -> None:
    """A target that loads has no requests."""
