"""Consoles of the commands. With ``NO_COLOR`` set, they write no escape sequences.

rich then removes only colours: bold text, and the cursor movements of progress, would be left.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
"""Time between two lines of a stage where a bar cannot be drawn."""


class Advance(Protocol):
    """Called with the steps since the last call."""

    def __call__(self, count: int, note: str | None = None) -> None:
        """Show them, with a note; None keeps the last one."""
        ...


def make_console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console for standard output, or for standard error."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=soft_wrap)
    if not console.no_color:
        return console
    return Console(stderr=stderr, highlight=False, soft_wrap=soft_wrap, color_system=None)


def can_redraw(console: Console) -> bool:
    """Return whether progress and live views may move the cursor."""
    return console.is_terminal and not console.no_color


@contextmanager
def progress(
    console: Console, title: str, total: int, *, done: int = 0, note: str = ""
) -> Iterator[Advance]:
    """Show how far a stage is: a bar, or lines if the console cannot show one."""
    if can_redraw(console):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(f"{title} {note}", total=total, completed=done)
            yield lambda count, note=None: bar.update(
                task, advance=count, description=None if note is None else f"{title} {note}"
            )
        return
    last, shown_at = note, -math.inf

    def advance(count: int, note: str | None = None) -> None:
        nonlocal done, last, shown_at
        done += count
        last = last if note is None else note
        if done >= total or time.monotonic() - shown_at >= LINE_SECONDS:
            shown_at = time.monotonic()
            console.print(f"{title}: {done} of {total} {last}".rstrip(), markup=False)

    advance(0)
    yield advance


def style_help() -> None:
    """Give the help of typer the styles of ``make_console``."""
    if Console().no_color:
        # A slow import that commands without help do not need.
        from typer import rich_utils  # noqa: PLC0415

        rich_utils.COLOR_SYSTEM = None
