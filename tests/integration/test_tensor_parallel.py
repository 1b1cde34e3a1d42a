"""A target with two ranks: its tokens, and its end when a rank ends."""

import asyncio
import os
import signal
from pathlib import Path

from tests.split_targets import (
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
