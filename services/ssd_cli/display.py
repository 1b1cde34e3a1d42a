"""What a person sees: progress of processes, summaries, errors."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ssd.launch import EventListener
from ssd.telemetry import Event
from ssd_cli.figures import Figures

out = Console(highlight=False, soft_wrap=True)
"""For results: text and tables that somebody may redirect."""
err = Console(stderr=True, highlight=False, soft_wrap=True)
"""For everything else: progress, summaries beside piped text, errors."""
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")

_UNKNOWN = "–"
_STAGES = {"load": "reading weights", "pack": "packing weights", "warm-up": "warming up"}


def write(text: str) -> None:
    """Write text to standard output as it is: no markup, no emoji codes, tabs stay tabs.

    On a terminal control characters become U+FFFD: a model must not move anybody's cursor.
    """
    out.file.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if out.is_terminal else text)
    out.file.flush()


def say(label: str, message: str, style: str = "yellow") -> None:
    """Say something on one line of standard error: ``label: message``."""
    # One print: above a live line, what has no end of line yet would be overwritten.
    err.print(Text.assemble((f"{label}:", style), " ", " ".join(message.split())))


@contextmanager
def startup_progress(*, is_quiet: bool) -> Iterator[EventListener]:
    """Show a bar for each process until the block ends; yields the listener of their events.

    Without a terminal nothing is shown.
    """
    if is_quiet or not err.is_terminal:
        yield lambda _name, _event: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        # Importing takes a process seconds before it can say anything.
        first = progress.add_task("starting", total=None)
        yield _bars(progress, first)


def _bars(progress: Progress, first: TaskID) -> EventListener:
    tasks: dict[str, TaskID] = {}

    def on_event(name: str, event: Event) -> None:
        progress.update(first, visible=False)
        if name not in tasks:
            tasks[name] = progress.add_task(f"{name}: starting", total=1.0)
        if event.name == "progress":
            stage = _STAGES.get(event.fields["stage"], event.fields["stage"])
            progress.update(
                tasks[name],
                description=f"{name}: {stage}",
                completed=float(event.fields["fraction"]),
            )
        elif event.name == "ready":
            progress.update(tasks[name], description=f"{name}: ready", completed=1.0)

    return on_event


_SEED = "seed"
_LATE = "late tables"
_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("mode", lambda f: f.mode),
    (_SEED, lambda f: str(f.seed)),
    ("tokens", lambda f: str(f.tokens)),
    ("tokens/s", lambda f: _number(f.tokens_per_second, 1)),
    ("time to first token", lambda f: f"{f.time_to_first_token_seconds * 1000:.0f} ms"),
    ("rounds", lambda f: _number(f.rounds, 0)),
    ("tokens a round", lambda f: _number(f.tokens_per_round, 2)),
    ("hit rate", lambda f: _percent(f.hit_rate)),
    (_LATE, lambda f: _number(f.late, 0)),
    (
        "verify / round",
        lambda f: f"{_milliseconds(f.verify_seconds)} / {_milliseconds(f.round_seconds)} ms",
    ),
    ("efficiency", lambda f: _number(f.efficiency, 2)),
)


def summary(columns: Sequence[tuple[str, Figures]], *, shows_seed: bool = False) -> Table:
    """Return a table of figures, one column a generation.

    What only the target knows has no row if all were cut short, and late tables have none if there
    were none. ``shows_seed`` is for texts that their seed repeats.
    """
    left_out = set() if shows_seed else {_SEED}
    if not any(item.late for _, item in columns):
        left_out.add(_LATE)
    are_cut_short = all(item.rounds is None for _, item in columns)
    is_titled = any(title for title, _ in columns)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=is_titled)
    table.add_column("")
    for title, _ in columns:
        table.add_column(title, justify="right")
    for label, show in _ROWS:
        if label in left_out:
            continue
        cells = [show(item) for _, item in columns]
        if not (are_cut_short and all(_UNKNOWN in cell for cell in cells)):
            table.add_row(f"[dim]{label}[/dim]", *cells)
    return table


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else seconds * 1000, 1)


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0%}"
