"""Coroutines and streams: as tasks beside a block of code, merged, and without an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
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


async def merged(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all streams as they arrive, with the index of the stream.

    It reads one item ahead of each, so streams notice a client that does not read. The first error
    ends all streams, as ``aclose`` does.
    """
    if len(streams) == 1:
        # Most requests have one, which needs no task.
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    reading = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(streams)}
    try:
        while reading:
            arrived, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for each in sorted(arrived, key=list(reading).index):
                index = reading.pop(each)
                try:
                    item = each.result()
                except StopAsyncIteration:
                    continue
                reading[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, item
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def known(result: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that does not wait."""
    try:
        result.send(None)
    except StopIteration as end:
        return cast("Result", end.value)
    finally:
        result.close()
    raise AssertionError("the coroutine waits")
