"""Protocols without tensors: the seams between a process and what surrounds it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ssd.types import GenerationChunk, TokenId


class Clock(Protocol):
    """Time, monotonic, in seconds. Called from any thread."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class TokenSink(Protocol):
    """Where the step loop puts the tokens of one request. Never blocks.

    Called from the step thread only, and never again after a chunk with a finish reason.
    """

    def put(self, chunk: GenerationChunk) -> None:
        """Hand over the tokens of one round."""
        ...

    def fail(self, error: Exception) -> None:
        """End the request with an error; nothing follows."""
        ...

    @property
    def is_abandoned(self) -> bool:
        """The reader has gone; the sequence should be cancelled."""
        ...


class ByteStream(Protocol):
    """Whole byte strings between two processes, in order.

    ``send`` may be called from any thread and never blocks; the receiver is called from one thread.
    """

    def start(
        self, on_payload: Callable[[bytes], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Deliver what arrives to ``on_payload``; call ``on_lost`` once when the peer is gone."""
        ...

    def send(self, payload: bytes) -> None:
        """Queue a payload.

        Raises:
            LinkError: the stream is closed, or its bounded outbox is full.
        """
        ...

    def close(self) -> None:
        """Idempotent; ``on_lost`` is not called for one's own close."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0..vocab_size - 1."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 over the sorted (token, id) list and the special ids, hexadecimal."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[TokenId]:
        """Ids that end a text."""
        ...

    @property
    def longest_token_bytes(self) -> int | None:
        """Bytes of UTF-8 that one token stands for at most; None where no length is known."""
        ...

    def encode(self, text: str) -> list[TokenId]:
        """Ids of a text, as the model was trained to see it."""
        ...

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        """Text of ids; incomplete characters become U+FFFD, special tokens are left out."""
        ...
