"""Tasks of the asyncio loop that run beside a block of code."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def beside(*work: Coroutine[Any, Any, Any]) -> AsyncGenerator[list[asyncio.Task[Any]], None]:
    """Run coroutines as tasks during the block; at its end, cancel them and wait for them.

    The block may read the results and errors of the tasks.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
