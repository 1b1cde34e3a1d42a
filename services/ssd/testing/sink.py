"""A token sink that records all chunks."""

from dataclasses import dataclass, field

from ssd.types import FinishReason, GenerationChunk, TokenId


@dataclass(slots=True)
class ListSink:
    """Implements ``ports.TokenSink`` and asserts its contract."""

    chunks: list[GenerationChunk] = field(default_factory=list)
    error: Exception | None = None
    is_abandoned: bool = False
    """Whether the reader has left; set by the test."""

    def put(self, chunk: GenerationChunk) -> None:
        """Record a chunk."""
        assert not self.has_ended, "a chunk after the end"
        self.chunks.append(chunk)

    def fail(self, error: Exception) -> None:
        """Record the error."""
        assert not self.has_ended, "an error after the end"
        self.error = error

    @property
    def has_ended(self) -> bool:
        """Whether the last chunk or an error has arrived."""
        return self.error is not None or self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the tokens ended; None before the last chunk."""
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def token_ids(self) -> tuple[TokenId, ...]:
        """All tokens so far."""
        return tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)
