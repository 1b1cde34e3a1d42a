"""Token ids to text in pieces of complete characters."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from ssd.ports import Tokenizer
from ssd.types import TokenId

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Text of a growing list of ids. One task or thread.

    The text is that of the bytes of all tokens, and so the same however they are divided into
    pushes. *Not chosen*: to decode several ids at once. Decoders with byte fallback replace a whole
    run of bytes if one character in it is malformed or incomplete.

    The decoders must treat each token alone, except at the start of a text. Decoders with a suffix
    of words (``</w>``) do not.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[TokenId] = ()) -> None:
        """Construct; ``before`` are the ids of the text that this one continues."""
        self._tokenizer = tokenizer
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._has_text = any(map(tokenizer.token_bytes, reversed(before)))

    def push(self, token_ids: Sequence[TokenId]) -> str:
        """Add new ids; return the new complete characters."""
        return self._characters.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        """Return the text held back; an incomplete character becomes U+FFFD."""
        return self._characters.decode(b"", final=True)

    def _bytes_of(self, token_id: TokenId) -> bytes:
        inside = self._tokenizer.token_bytes(token_id)
        if self._has_text or not inside:
            return inside
        self._has_text = True
        # The decoder of Llama 2 removes a space at the start of a text.
        start = self._tokenizer.decode([token_id])
        return inside if REPLACEMENT in start else start.encode()
