"""Protocols without tensors: interfaces that tests replace with fakes."""

import time
from collections.abc import Sequence
from typing import Protocol

from ssd.types import GenerationChunk, TokenId


class Clock(Protocol):
    """Monotonic time in seconds. Called from any thread."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.perf_counter()


class TokenSink(Protocol):
    """Receives the tokens of one request from the step loop. Never blocks.

    Called from the step thread only, and never again after a chunk with a finish reason.
    """

    def put(self, chunk: GenerationChunk) -> None:
        """Add the tokens of one round."""

    def fail(self, error: Exception) -> None:
        """End the request with an error. No call follows."""

    @property
    def is_abandoned(self) -> bool:
        """Whether the reader has left or is too far behind; the sequence is then cancelled."""


class Tokenizer(Protocol):
    """Converts text to token ids and back. Called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0..vocab_size - 1."""

    @property
    def fingerprint(self) -> str:
        """sha256 over the sorted (token, id) list and the special ids, hexadecimal."""

    @property
    def eos_token_ids(self) -> frozenset[TokenId]:
        """Ids that end a text."""

    @property
    def longest_token_bytes(self) -> int | None:
        """Maximum number of UTF-8 bytes of one token; None if unknown."""

    @property
    def definition(self) -> str:
        """Content of its ``tokenizer.json``."""

    def encode(self, text: str, *, has_prefix: bool = False) -> list[TokenId]:
        """Return the token ids of a text, in the form that the model was trained on.

        They begin with the model's prefix, such as Llama's first token. ``has_prefix``: the text
        has it already.
        """

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        """Return the text of ids without special tokens; incomplete characters become U+FFFD."""

    def token_text(self, token_id: TokenId) -> str:
        """Return the text of one token as it is inside a text.

        ``decode`` of one token is the start of a text, where some decoders remove a space.
        """

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the UTF-8 of one token inside a text, also of a part of a character.

        Special tokens have none.
        """

    def special_name(self, token_id: TokenId) -> str:
        """Return the name of a special token, such as ``<|endoftext|>``; empty for others."""
