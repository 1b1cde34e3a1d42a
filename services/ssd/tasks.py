"""Coroutines and streams: as tasks beside a block of code, merged, and without an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.asynccontextmanager
async def beside(*work: Coroutine[Any, Any, Any]) -> AsyncGenerator[list[asyncio.Task[Any]], None]:
    """Run coroutines as tasks during the block; at its end, cancel them and wait for them.

    The block may read the results and errors of the tasks.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        await _cancel(tasks)


async def first_result(*work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for the first of several coroutines; cancel the others and wait for them.

    Raises:
        Exception: the exception of the first one.
    """
    async with beside(*work) as tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        result: Result = done.pop().result()
        return result


async def merged(
    streams: Sequence[AsyncGenerator[Item, None]], *, hold_seconds: float = 0.0
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all streams as they arrive, with the index of the stream.

    With several streams, the first items are held until each stream has one, but no longer than
    ``hold_seconds``. The error of a stream that fails meanwhile comes before all items.

    It reads one item ahead of each of several streams, so they notice a client that does not read.
    The first error ends all streams, as ``aclose`` does.
    """
    if len(streams) == 1:
        # Most requests have one, which needs no task.
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    async with contextlib.AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(contextlib.aclosing(stream))
        reading = {
            asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)
        }
        stack.push_async_callback(_cancel, reading)
        if hold_seconds:
            early, _ = await asyncio.wait(
                reading, timeout=hold_seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in sorted(early, key=reading.__getitem__):
                if not isinstance(task.exception(), StopAsyncIteration):
                    task.result()
        while reading:
            arrived, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            # Items that have arrived come before an error, in the order of the streams.
            for task in sorted(arrived, key=lambda it: (it.exception() is not None, reading[it])):
                index = reading.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                reading[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, item


async def _cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
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
