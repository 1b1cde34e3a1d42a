"""Texts of a target, read to their end."""

import asyncio
from dataclasses import dataclass
from typing import Any

from ssd.rpc.client import TargetClient
from ssd.types import GenerationChunk, PositionLogprobs, SpeculationStatistics, TokenId


@dataclass(frozen=True, slots=True)
class Text:
    """One continuation."""

    chunks: tuple[GenerationChunk, ...]

    @property
    def token_ids(self) -> tuple[TokenId, ...]:
        """Tokens of all chunks."""
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def text(self) -> str:
        """Texts of all chunks."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Log-probabilities of all chunks."""
        return tuple(each for chunk in self.chunks for each in chunk.logprobs)

    @property
    def last(self) -> GenerationChunk:
        """The chunk with the reason of the end."""
        return self.chunks[-1]

    @property
    def statistics(self) -> SpeculationStatistics:
        """Statistics of all its rounds."""
        assert self.last.statistics is not None
        return self.last.statistics


async def read(client: TargetClient, *call: Any, begun: asyncio.Event | None = None) -> Text:
    """Read the only continuation of a prompt to its end; see ``read_choices``."""
    (text,) = (await read_choices(client, *call, begun=begun)).values()
    return text


async def read_choices(
    client: TargetClient, *call: Any, begun: asyncio.Event | None = None
) -> dict[int, Text]:
    """Read the continuations of a prompt to their end; return them by number.

    Args:
        client: of the target.
        call: arguments of ``generate``.
        begun: is set at the first tokens.
    """
    chunks: dict[int, list[GenerationChunk]] = {}
    async for chunk in client.generate(*call):
        chunks.setdefault(chunk.choice, []).append(chunk)
        if begun is not None:
            begun.set()
    return {choice: Text(tuple(own)) for choice, own in chunks.items()}
