"""Several streams as one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from ssd.tasks import beside

Item = TypeVar("Item")
_WAITING = 16
"""Maximum number of items that wait for the reader."""


async def merged(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all streams as they arrive, with the index of the stream.

    The first error ends all streams, as ``aclose`` does.
    """
    if len(streams) == 1:
        # Most requests have one. They need no queue and no task.
        async with contextlib.aclosing(streams[0]) as only:
            async for each in only:
                yield 0, each
        return
    queue: asyncio.Queue[tuple[int, Item] | asyncio.Task[None]] = asyncio.Queue(_WAITING)

    async def read(index: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async for item in stream:
                await queue.put((index, item))
        finally:
            await stream.aclose()

    async def watch(task: "asyncio.Task[None]") -> None:
        await asyncio.wait({task})
        await queue.put(task)

    async with (
        beside(*(read(*each) for each in enumerate(streams))) as readers,
        beside(*map(watch, readers)),
    ):
        num_open = len(readers)
        while num_open:
            match await queue.get():
                case asyncio.Task() as ended:
                    ended.result()
                    num_open -= 1
                case item:
                    yield item
