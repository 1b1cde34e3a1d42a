"""A target with two ranks: its tokens, and its end when a rank ends."""

import asyncio
import os
import signal
from pathlib import Path

from tests.processes import completed
from tests.split_targets import (
    SHAPE,
    assert_tokens,
    failure,
    generate_until_the_end,
    linked_target,
    pids_of,
    texts_of_one_rank,
    until_running,
    write_model,
)


async def test_two_ranks_select_the_tokens_of_one_and_end_together(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    expected = await texts_of_one_rank(folder)
    async with linked_target(folder, 2) as process:
        await assert_tokens(process, expected)
        load = asyncio.create_task(generate_until_the_end(process))
        await until_running(process)
        os.kill(pids_of(process)[1], signal.SIGKILL)
        last = await failure(process)
        # The client receives the cause, not only the end of its connection.
        assert "the target ends: rank 1 was killed by signal 9 (SIGKILL)" in str(await load)
        assert last.fields["error"] == "RankError"
        assert str(last.fields["message"]).startswith("rank 1 was killed by signal 9 (SIGKILL)")


def test_a_size_that_the_model_or_the_engine_does_not_allow_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    for flags, words in (
        (("--tensor-parallel-size", "8"), "does not divide the 4 attention heads"),
        (("--tensor-parallel-size", "3"), "'3' is not one of 1, 2, 4, 8"),
        (
            ("--tensor-parallel-size", "2", "--engine", "openvino"),
            "engine openvino: it runs on one rank, and tensor_parallel_size is 2",
        ),
    ):
        refused = completed("ssd_target", "--model", str(folder), *SHAPE, "--print-config", *flags)
        assert refused.code == os.EX_CONFIG
        assert words in refused.stderr
