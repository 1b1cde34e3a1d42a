"""Consoles whose contents a test reads."""

import io
from typing import Any

from rich.console import Console


class Screen(Console):
    """A console that keeps what is printed; options of ``Console``."""

    def __init__(self, **options: Any) -> None:
        self._printed = io.StringIO()
        super().__init__(file=self._printed, **options)

    @property
    def text(self) -> str:
        """All that was printed."""
        return self._printed.getvalue()
