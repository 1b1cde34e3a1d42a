"""Lines that a user writes: at a terminal, or through a pipe."""

import contextlib
import os
from pathlib import Path
from typing import Protocol

from ssd.errors import RequestError
from ssd.runtime.threads import in_daemon_thread

MAX_LINE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
HISTORY = Path(".local/state/ssd/chat_history")
"""File of earlier lines, in the home folder; only its owner can read it."""


class LineInput(Protocol):
    """Where a user writes. Asyncio loop."""

    @property
    def is_terminal(self) -> bool:
        """Whether a person types the lines."""

    async def read(self) -> str | None:
        """Return the next line without its end; None after the last one.

        Raises:
            RequestError: the line is too long or not UTF-8.
        """


def open_lines(descriptor: int) -> LineInput:
    """Return the lines of a file descriptor, with editing and history if it is a terminal."""
    if not os.isatty(descriptor):
        return PipedLines(descriptor)
    try:
        home = Path.home()
    except RuntimeError:
        # The user has none.
        return TerminalLines(None)
    return TerminalLines(home)


class PipedLines:
    """Lines of a file descriptor that is no terminal."""

    is_terminal = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""
        self._is_over = False

    async def read(self) -> str | None:
        """See ``LineInput``."""
        while b"\n" not in self._unread and not self._is_over:
            if len(self._unread) > MAX_LINE_BYTES:
                raise RequestError(f"a line of the input has more than {MAX_LINE_BYTES} bytes")
            # Without Python's buffer, which the thread of a read would lock at the end.
            block = await in_daemon_thread(lambda: os.read(self._descriptor, _READ_BYTES))
            self._is_over = not block
            self._unread += block
        if not self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return line.decode().removesuffix("\r")
        except UnicodeDecodeError:
            raise RequestError("the input is not UTF-8") from None


class TerminalLines:
    """Lines that a person types: editing, history in a file, search with Ctrl-R."""

    is_terminal = True

    def __init__(self, home: Path | None) -> None:
        # Imported only at a terminal: it takes a fifth of a second.
        from prompt_toolkit import PromptSession  # noqa: PLC0415
        from prompt_toolkit.history import FileHistory, InMemoryHistory  # noqa: PLC0415

        # Earlier lines of this program are found in any case.
        history: FileHistory | InMemoryHistory = InMemoryHistory()
        if home is not None:
            with contextlib.suppress(OSError):
                file = home / HISTORY
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
                history = FileHistory(str(file))
        self._session = PromptSession[str](history=history)

    async def read(self) -> str | None:
        """See ``LineInput``. Ctrl-C clears the line."""
        while True:
            try:
                return await self._session.prompt_async("> ")
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None
