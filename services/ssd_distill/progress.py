"""Progress of a stage on standard error, and the first Ctrl-C, which waits for the step."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ssd.console import can_redraw
from ssd_cli.display import err, report

LINE_SECONDS = 10.0
"""Time between two lines where a bar cannot be drawn."""


class Advance(Protocol):
    """Called with the steps since the last call, and a figure to show."""

    def __call__(self, count: int, note: str = "") -> None:
        """Show them."""
        ...


@contextmanager
def progress(title: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show how far a stage is: a bar, or lines if standard error cannot show one."""
    if can_redraw(err):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
            task = bar.add_task(title, total=total, completed=done)
            yield lambda count, note="": bar.update(
                task, advance=count, description=f"{title} {note}"
            )
        return
    shown = time.monotonic()

    def advance(count: int, note: str = "") -> None:
        nonlocal done, shown
        done += count
        if done >= total or time.monotonic() - shown >= LINE_SECONDS:
            shown = time.monotonic()
            report(title, f"{done} of {total} {note}")

    yield advance


@contextmanager
def held_interrupt() -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets; the second one interrupts as usual."""
    is_set = Event()
    usual = signal.getsignal(signal.SIGINT)

    def hold(_number: int, _frame: FrameType | None) -> None:
        is_set.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, hold)
    try:
        yield is_set
    finally:
        signal.signal(signal.SIGINT, usual)
