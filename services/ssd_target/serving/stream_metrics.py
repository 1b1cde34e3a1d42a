"""Prometheus metrics of one stream of tokens."""

from ssd.telemetry import E2E_SECONDS, INTER_TOKEN_SECONDS, TIME_TO_FIRST_TOKEN_SECONDS
from ssd.types import FinishReason, GenerationChunk

_COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class StreamMetrics:
    """Observes the chunks of one request. Asyncio loop."""

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._previous_at: float | None = None

    def observe(self, chunk: GenerationChunk, now: float) -> None:
        """Publish the times of a chunk that has arrived."""
        if chunk.token_ids:
            if self._previous_at is None:
                TIME_TO_FIRST_TOKEN_SECONDS.observe(now - self._arrived_at)
            else:
                INTER_TOKEN_SECONDS.observe((now - self._previous_at) / len(chunk.token_ids))
            self._previous_at = now
        if chunk.finish_reason in _COMPLETE:
            E2E_SECONDS.observe(now - self._arrived_at)
