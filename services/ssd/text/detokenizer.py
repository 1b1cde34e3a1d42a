"""Token ids to text, a piece at a time, never half a character."""

from collections.abc import Sequence

from ssd.ports import Tokenizer
from ssd.types import TokenId

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER_TOKENS = 16
"""Tokens that wait for their character; past it the text is malformed and goes out in parts."""
UNDECIDED_TOKENS = 3
"""Tokens whose bytes the next token can still turn into a character: UTF-8 has up to four bytes."""


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
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._num_read <= LONGEST_CHARACTER_TOKENS:
            return ""
        # Malformed so far: let go up to the last token that certainly ends a character.
        for end in range(len(self._window) - UNDECIDED_TOKENS, self._num_read, -1):
            head = self._tokenizer.decode(self._window[:end])
            if text.startswith(head):
                return self._advance(end, head)
        return ""

    def finish(self) -> str:
        """Return what was held back; incomplete characters become U+FFFD."""
        return self._advance(len(self._window), self._tokenizer.decode(self._window))

    def _advance(self, end: int, text: str) -> str:
        """Take the first ``end`` ids of the window, which say ``text``, as read."""
        fresh = text[len(self._read_text) :]
        recent = self._window[self._num_read : end]
        self._window = self._window[self._num_read :]
        self._num_read = len(recent)
        self._read_text = self._tokenizer.decode(recent)
        return fresh
