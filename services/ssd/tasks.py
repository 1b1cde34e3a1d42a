"""Coroutines: as tasks beside a block of code, and without an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar, cast

Result = TypeVar("Result")


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


def known(result: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that does not wait."""
    try:
        result.send(None)
    except StopIteration as end:
        return cast("Result", end.value)
    finally:
        result.close()
    raise AssertionError("the coroutine waits")
