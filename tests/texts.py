"""Texts of a target, read to their end."""

import asyncio
from dataclasses import dataclass
from typing import Any

from ssd.rpc.client import TargetClient
from ssd.types import GenerationChunk, SpeculationStatistics, TokenId


@dataclass(frozen=True, slots=True)
class Text:
    """One continuation."""

    token_ids: tuple[TokenId, ...]
    text: str
    last: GenerationChunk

    @property
    def statistics(self) -> SpeculationStatistics:
        """Statistics of all its rounds."""
        assert self.last.statistics is not None
        return self.last.statistics


async def read(client: TargetClient, *call: Any, begun: asyncio.Event | None = None) -> Text:
    """Read a continuation to its end.

    Args:
        client: of the target.
        call: arguments of ``generate``.
        begun: is set at the first tokens.
    """
    chunks: list[GenerationChunk] = []
    async for chunk in client.generate(*call):
        chunks.append(chunk)
        if begun is not None:
            begun.set()
    token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return Text(token_ids, "".join(chunk.text for chunk in chunks), chunks[-1])
