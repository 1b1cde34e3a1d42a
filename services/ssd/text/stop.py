"""The text of tokens, up to a stop string."""

from collections.abc import Sequence

from ssd.ports import Tokenizer
from ssd.text.detokenizer import IncrementalDetokenizer
from ssd.types import TokenId


class StopStrings:
    """Returns text up to the first stop string; holds back text that may start one.

    One task or thread.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.is_complete = False

    def push(self, text: str) -> str:
        """Add text; return the text that cannot be part of a stop string."""
        if self.is_complete:
            return ""
        text = self._held + text
        # The match that is complete first ends the text, as if characters arrived one at a time.
        matches = [
            (text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text
        ]
        if matches:
            self.is_complete = True
            self._held = ""
            return text[: min(matches)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text held back, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        return "" if self.is_complete else held


class TextWriter:
    """Returns the text of one continuation in pieces. Belongs to one task or thread.

    The step thread has one to end the sequence at the token that completes a stop string. The one
    of the stream ends the text before that string. Both process the same tokens, so they find the
    same end.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], before: Sequence[TokenId] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, before)
        self._stop = StopStrings(stop)
        self._has_stops = bool(stop)

    @property
    def is_complete(self) -> bool:
        """Whether the text contains a stop string."""
        return self._stop.is_complete

    def push(self, token_ids: Sequence[TokenId]) -> str:
        """Add tokens; return complete characters that cannot be part of a stop string."""
        if not self._has_stops:
            return self._detokenizer.push(token_ids)
        # One by one, as on the step thread: the position of a complete stop string depends on it.
        pieces = [self._stop.push(self._detokenizer.push([token_id])) for token_id in token_ids]
        return "".join(pieces)

    def completes(self, token_id: TokenId) -> bool:
        """Add the next token; true if the text now contains a stop string."""
        self.push([token_id])
        return self.is_complete

    def finish(self) -> str:
        """Return the held-back text; empty after a stop string."""
        return self._stop.push(self._detokenizer.finish()) + self._stop.finish()


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
