"""Several continuations of one request as one stream of chunks. Asyncio loop."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from ssd.types import GenerationChunk

Chunks = AsyncGenerator[GenerationChunk, None]


async def merged(readers: Sequence[Chunks]) -> Chunks:
    """Yield the chunks of all readers as they arrive, each until its finish reason.

    It reads one chunk ahead of each, so the streams notice a client that does not read.

    Raises:
        SSDError: one of them failed; the others are closed.
    """
    reading = {asyncio.ensure_future(anext(reader)): reader for reader in readers}
    try:
        while reading:
            arrived, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for each in sorted(arrived, key=list(reading).index):
                chunk, reader = each.result(), reading.pop(each)
                if chunk.finish_reason is None:
                    reading[asyncio.ensure_future(anext(reader))] = reader
                yield chunk
    finally:
        for each in reading:
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
