"""Token ids to text, a piece at a time, never half a character."""

from collections.abc import Sequence

from ssd.ports import Tokenizer
from ssd.types import TokenId

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER_TOKENS = 16
"""Tokens that may hold parts of one character; past it the text is taken as malformed."""


class IncrementalDetokenizer:
    """Text of a growing list of ids.

    A window of recent ids is decoded twice, without and with the new ones: the difference is new
    text, whatever a decoder does at the start of a text. Belongs to one task or thread.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[TokenId] = []
        self._num_read = 0
        self._read_text = ""

    def push(self, token_ids: Sequence[TokenId]) -> str:
        """Take new ids; return the text that became whole."""
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window)
        pending = len(self._window) - self._num_read
        if text.endswith(REPLACEMENT) and pending <= LONGEST_CHARACTER_TOKENS:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Return what was held back; incomplete characters become U+FFFD."""
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, text: str) -> str:
        fresh = text[len(self._read_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._tokenizer.decode(self._window)
        return fresh
