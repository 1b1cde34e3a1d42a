"""Token ids to text in pieces of complete characters."""

from collections.abc import Sequence

from ssd.ports import Tokenizer
from ssd.types import TokenId

REPLACEMENT = "\ufffd"
MAX_CHARACTER_TOKENS = 16
"""Largest number of tokens held back for one character. With more, the text is malformed and is
returned in parts."""
WINDOW_BEFORE = 8
"""Number of ids of the text before that are decoded, too: some can be special, and have no text."""
UNDECIDED_TOKENS = 3
"""Number of last tokens that can still be part of a character: UTF-8 has up to four bytes."""


class IncrementalDetokenizer:
    """Text of a growing list of ids.

    A window of recent ids is decoded without and with the new ids, and the difference is the new
    text. So the result does not depend on how a decoder treats the start of a text. The decoder of
    Llama 2 removes a space there. One task or thread.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[TokenId] = ()) -> None:
        """Construct; ``before`` are the ids of the text that this one continues."""
        self._tokenizer = tokenizer
        self._window = list(before[-WINDOW_BEFORE:])
        self._read_text = tokenizer.decode(self._window) if self._window else ""
        if self._read_text.endswith(REPLACEMENT):
            # The text ends in a part of a character.
            self._window, self._read_text = [], ""
        self._num_read = len(self._window)

    def push(self, token_ids: Sequence[TokenId]) -> str:
        """Add new ids; return the new complete characters."""
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._num_read <= MAX_CHARACTER_TOKENS:
            return ""
        # Malformed: return the text up to the last token that ends a character.
        for end in range(len(self._window) - UNDECIDED_TOKENS, self._num_read, -1):
            head = self._tokenizer.decode(self._window[:end])
            if text.startswith(head):
                return self._advance(end, head)
        return ""

    def finish(self) -> str:
        """Return the text held back; incomplete characters become U+FFFD."""
        return self._advance(len(self._window), self._tokenizer.decode(self._window))

    def _advance(self, end: int, text: str) -> str:
        """Mark the first ``end`` ids of the window, whose text is ``text``, as read."""
        fresh = text[len(self._read_text) :]
        recent = self._window[self._num_read : end]
        self._window = self._window[self._num_read :]
        self._num_read = len(recent)
        self._read_text = self._tokenizer.decode(recent)
        return fresh
