"""Terminal output: progress of processes, summaries, errors."""

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
"""Standard output: results, which users redirect."""
err = Console(stderr=True, highlight=False, soft_wrap=True)
"""Standard error: progress, summaries of redirected text, errors."""
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")

UNKNOWN = "–"
"""Cell of a figure that was not measured."""
_UNLIMITED = 1 << 16
"""Width of redirected tables; without it, rich wraps them at 80 columns."""
_STAGES = {"load": "reading weights", "pack": "packing weights", "warm-up": "warming up"}


def write(text: str) -> None:
    """Write text to standard output unchanged: no markup, no emoji codes, tabs stay tabs.

    On a terminal, control characters become U+FFFD, so that a model cannot move the cursor.
    """
    out.file.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if out.is_terminal else text)
    out.file.flush()


def print_table(console: Console, table: Table) -> None:
    """Print a table. A terminal wraps long cells; redirected rows stay on one line."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_UNLIMITED)
    console.print(table)


def report(label: str, message: str, style: str = "yellow") -> None:
    """Print ``label: message`` on one line of standard error."""
    # A single print: a live status line would overwrite a line without its end.
    err.print(Text.assemble((f"{label}:", style), " ", " ".join(message.split())))


@contextmanager
def startup_progress(*, is_quiet: bool) -> Iterator[EventListener]:
    """Show a progress bar for each process during the block; yield the listener of their events.

    Show nothing if standard error is not a terminal.
    """
    if is_quiet or not err.is_terminal:
        yield lambda _name, _event: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        # A process needs seconds for its imports before its first event.
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
_PAUSED = "speculation off"
_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("mode", lambda f: f.mode or UNKNOWN),
    (_SEED, lambda f: str(f.seed)),
    ("tokens", lambda f: str(f.tokens)),
    ("tokens/s", lambda f: _number(f.tokens_per_second, 1)),
    ("time to first token", lambda f: f"{f.time_to_first_token_seconds * 1000:.0f} ms"),
    ("rounds", lambda f: _number(f.rounds, 0)),
    ("tokens per round", lambda f: _number(f.tokens_per_round, 2)),
    ("hit rate", lambda f: _percent(f.hit_rate)),
    (_LATE, lambda f: _number(f.late, 0)),
    (_PAUSED, lambda f: f"{_percent(_share(f.paused_rounds, f.rounds))} of rounds: slower here"),
    (
        "verify / round",
        lambda f: f"{_milliseconds(f.verify_seconds)} / {_milliseconds(f.round_seconds)} ms",
    ),
    ("efficiency", lambda f: _number(f.efficiency, 2)),
)


def summary(columns: Sequence[tuple[str, Figures]], *, shows_seed: bool = False) -> Table:
    """Return a table of figures with one column for each generation.

    Figures of the target have no row if all generations are partial. Late tables, and rounds for
    which the target had turned speculation off, have a row only if there were any.

    Args:
        columns: title and figures of each generation.
        shows_seed: whether the seed has a row. Greedy texts do not depend on it.
    """
    hidden = set() if shows_seed else {_SEED}
    if not any(item.late for _, item in columns):
        hidden.add(_LATE)
    if not any(item.paused_rounds for _, item in columns):
        hidden.add(_PAUSED)
    are_partial = all(item.rounds is None for _, item in columns)
    is_titled = any(title for title, _ in columns)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=is_titled)
    table.add_column("")
    for title, _ in columns:
        table.add_column(title, justify="right")
    for label, show in _ROWS:
        if label in hidden:
            continue
        cells = [show(item) for _, item in columns]
        if not (are_partial and all(UNKNOWN in cell for cell in cells)):
            table.add_row(f"[dim]{label}[/dim]", *cells)
    return table


def metrics_line(figures: Figures) -> str:
    """Return the figures of one answer on one line; those that are unknown are left out."""
    parts = [f"{figures.tokens} tokens"]
    if figures.tokens_per_second is not None:
        parts.append(f"{figures.tokens_per_second:.0f} tokens/s")
    parts.append(f"first token {figures.time_to_first_token_seconds * 1000:.0f} ms")
    if figures.tokens_per_round is not None:
        parts.append(f"{figures.tokens_per_round:.2f} tokens per round")
    if figures.hit_rate is not None:
        tables = sum(filter(None, (figures.hits, figures.misses, figures.late)))
        parts.append(f"hits {figures.hit_rate:.0%} of {tables} tables")
    if figures.late:
        parts.append(f"{figures.late} late")
    if figures.mode is not None:
        parts.append(figures.mode)
    if figures.paused_rounds:
        share = _percent(_share(figures.paused_rounds, figures.rounds))
        parts.append(f"off in {share} of rounds: slower here")
    return ", ".join(parts)


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else seconds * 1000, 1)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"
