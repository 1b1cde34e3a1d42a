"""A tokenizer whose tokens are bytes."""

import hashlib
from collections.abc import Sequence

from ssd.types import TokenId

NUM_BYTES = 256


class ByteTokenizer:
    """Implements ``ports.Tokenizer``: ids 0..255 are the bytes of UTF-8, 256 ends a text."""

    @property
    def vocab_size(self) -> int:
        """Bytes and the end."""
        return NUM_BYTES + 1

    @property
    def fingerprint(self) -> str:
        """Return a constant."""
        return hashlib.sha256(b"ssd byte tokenizer").hexdigest()

    @property
    def eos_token_ids(self) -> frozenset[TokenId]:
        """The id that is not a byte."""
        return frozenset({NUM_BYTES})

    @property
    def longest_token_bytes(self) -> int | None:
        """One."""
        return 1

    @property
    def definition(self) -> str:
        """Nothing: this is no tokenizer of the library."""
        return ""

    def encode(self, text: str, *, has_prefix: bool = False) -> list[TokenId]:  # noqa: ARG002 there is none
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        """The text of bytes; the end is left out, broken characters become U+FFFD."""
        return bytes(token for token in token_ids if token < NUM_BYTES).decode(errors="replace")

    def token_text(self, token_id: TokenId) -> str:
        """The character of the byte; nothing for the end."""
        return self.decode([token_id])

    def token_bytes(self, token_id: TokenId) -> bytes:
        """The byte; nothing for the end."""
        return bytes([token_id]) if token_id < NUM_BYTES else b""

    def special_name(self, token_id: TokenId) -> str:
        """The name of the end; nothing for bytes."""
        return "<end>" if token_id == NUM_BYTES else ""
