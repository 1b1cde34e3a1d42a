"""Stop strings in a stream of text."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string; holds back what may be the start of one.

    Belongs to one task or thread.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.is_complete = False

    def push(self, text: str) -> str:
        """Take text; return what no stop string can claim; nothing once one is complete."""
        if self.is_complete:
            return ""
        text = self._held + text
        # The earliest completed match ends the text, as if characters came one at a time.
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
        """Return what was held back: the text is over and no stop string came."""
        held, self._held = self._held, ""
        return "" if self.is_complete else held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
