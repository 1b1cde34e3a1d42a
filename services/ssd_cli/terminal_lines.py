"""Lines that a person types: editing, history in a file, search with Ctrl-R."""

from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

HISTORY = Path(".local/state/ssd/chat_history")
"""File of earlier lines, in the home folder; only its owner can read it."""


class TerminalLines:
    """Implements ``LineInput`` with prompt_toolkit."""

    is_terminal = True

    def __init__(self, home: Path) -> None:
        self._session: PromptSession[str] = PromptSession(history=_history(home / HISTORY))

    async def read(self) -> str | None:
        """See ``LineInput``. Ctrl-C clears the line."""
        while True:
            try:
                return await self._session.prompt_async("> ")
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None


def _history(file: Path) -> History:
    """Return the history of a file; if it cannot be written, one that ends with the program."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
