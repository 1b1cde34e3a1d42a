"""Stop strings in a stream of text."""

from collections.abc import Sequence


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
        found = [
            (text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text
        ]
        if found:
            self.is_complete = True
            self._held = ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text held back, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        return "" if self.is_complete else held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
