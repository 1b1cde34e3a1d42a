"""Tasks beside a block end with it."""

import asyncio

import pytest

from ssd.tasks import beside


async def test_a_task_ends_with_the_block_and_is_waited_for() -> None:
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("work")

    async def block() -> None:
        async with beside(work()):
            await asyncio.sleep(0)
            raise ValueError("block")

    with pytest.raises(ValueError, match="block"):
        await block()
    assert ends == ["work"]


async def test_the_block_reads_the_error_of_a_task() -> None:
    async def work() -> None:
        raise ValueError("work")

    async with beside(work()) as (task,):
        await asyncio.wait({task})
        with pytest.raises(ValueError, match="work"):
            task.result()
