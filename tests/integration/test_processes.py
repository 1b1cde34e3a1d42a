"""The processes of these tests."""

import asyncio
from pathlib import Path

from tests.processes import running_code

MAX_SECONDS = 20.0
MORE_THAN_A_PIPE_HOLDS = 200_000
LOGS_MUCH = f"""
import pathlib, sys
sys.stderr.write("x" * {MORE_THAN_A_PIPE_HOLDS})
sys.stderr.flush()
pathlib.Path(sys.argv[1]).touch()
"""


async def test_a_process_whose_log_the_test_does_not_read_continues(tmp_path: Path) -> None:
    done = tmp_path / "done"
    async with running_code(LOGS_MUCH, str(done)) as process, asyncio.timeout(MAX_SECONDS):
        while not done.exists():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.01)
        assert await process.wait() == 0
