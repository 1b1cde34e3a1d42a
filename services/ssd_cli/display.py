"""Terminal output: progress of processes, summaries, errors."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ssd.console import can_redraw, make_console
from ssd.observability.log import Event, printable
from ssd.runtime.launch import EventListener
from ssd_cli.figures import Figures

out = make_console()
"""Standard output: results, which users redirect."""
err = make_console(stderr=True)
"""Standard error: progress, summaries of redirected text, errors."""
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")

UNKNOWN = "–"
"""Cell of a figure that was not measured."""
_GAP = 2
"""Columns between the cells of a table without lines."""
_UNLIMITED = 1 << 16
"""Width of redirected tables; without it, rich wraps them at 80 columns."""
_PROBLEMS = {"warning": "yellow", "error": "red", "critical": "red"}
"""Style of events that report a problem, by their level."""
_UNPRINTED = frozenset({"ts", "process"})
"""Fields of an event that its line leaves out."""
_SENTENCES = {
    "fan_out_not_read": "an earlier fit of the fan-out is not used",
    "fan_out_not_kept": "the fit of the fan-out is not kept",
}
"""Effect of events that change nothing else for a user."""
_STAGES = {"load": "reading weights", "pack": "packing weights", "warm-up": "warming up"}


def write(text: str) -> None:
    """Write text to standard output unchanged: no markup, no emoji codes, tabs stay tabs.

    On a terminal, control characters become U+FFFD, so that a model cannot move the cursor.
    """
    out.file.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if out.is_terminal else text)
    out.file.flush()


def plain_table(*left: str, right: Iterable[str] = (), no_wrap: bool = False) -> Table:
    """Return a table without lines: columns of words, then columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in left:
        table.add_column(title, no_wrap=no_wrap)
    for title in right:
        table.add_column(title, justify="right", no_wrap=no_wrap)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table. A terminal wraps long cells; redirected rows stay on one line."""
    if not console.is_terminal:
        wide = Console(file=console.file, width=_UNLIMITED, markup=False, emoji=False)
        wide.print(table)
        return
    console.print(fitted(console, table), soft_wrap=False)


def fitted(console: Console, table: Table) -> RenderableType:
    """Return the table, or its rows as text if the terminal is too narrow for its words."""
    options = console.options.update(max_width=_UNLIMITED)
    width = _GAP * (len(table.columns) - 1)
    for column in table.columns:
        sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        width += max(size.maximum if column.no_wrap else size.minimum for size in sizes)
    return table if width <= console.width else Group(*_as_text(table))


def _as_text(table: Table) -> Iterator[RenderableType]:
    """Yield the first cell of each row, then its other cells with their titles."""
    titles = [str(column.header) for column in table.columns]
    for first, *rest in zip(*(column.cells for column in table.columns), strict=True):
        yield first
        named = zip(titles[1:], map(_text, rest), strict=True)
        cells = [Text(f"{title} ").append_text(cell) for title, cell in named if cell]
        yield Padding(Text(", ").join(cells), (0, 0, 0, 2))


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show what is in progress during the block: a spinner, or a line."""
    if not can_redraw(err):
        err.print(message)
        yield
        return
    with err.status(Text(message)):
        yield


def report_event(name: str, event: Event, *, is_debug: bool) -> None:
    """Print an event of a process on one line if a user needs it; with ``is_debug``, each event.

    The command prints the error of the event ``failed`` itself.
    """
    fields = dict(event.fields)
    level = str(fields.pop("level", ""))
    is_problem = level in _PROBLEMS and event.name != "failed"
    if not (is_debug or is_problem or event.name == "target_not_ready"):
        return
    hidden = _UNPRINTED if is_debug else {*_UNPRINTED, "stack"}
    words = [f"{key}={value}" for key, value in fields.items() if key not in hidden]
    message = " ".join([event.name, *words])
    if not is_debug and (effect := _SENTENCES.get(event.name)):
        message = f"{effect}; nothing else changes ({fields.get('file')}: {fields.get('reason')})"
    report(name, printable(" ".join(message.split())), _PROBLEMS.get(level, "dim"))


def report(label: str, message: str, style: str = "yellow") -> None:
    """Print ``label: message`` on one line of standard error."""
    # A single print: a live status line would overwrite a line without its end.
    print_if_possible(Text.assemble((f"{label}:", style), " ", " ".join(message.split())))


def print_if_possible(text: Text | str) -> None:
    """Print to standard error. A text is lost if it cannot be written, as on a full disk.

    An error would end what reports: the reader of a process's log, or the restarts of drafts.
    """
    try:
        err.print(text)
    except OSError:
        # The console keeps what it has not written, and drops it when it is quiet.
        err.quiet = True
        err.print()
        err.quiet = False


@contextmanager
def startup_progress(*, is_quiet: bool) -> Iterator[EventListener]:
    """Show the stages of each process during the block: a bar, or lines.

    Yields the listener of their events.
    """
    if is_quiet:
        yield lambda _name, _event: None
        return
    if not can_redraw(err):
        # A process needs seconds for its imports before its first event.
        print_if_possible("starting")
        yield _stage_lines()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(24), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        first = progress.add_task("starting", total=None)
        yield _bars(progress, first)


def _stage_lines() -> EventListener:
    stages: dict[str, str] = {}

    def on_event(name: str, event: Event) -> None:
        stage = _stage_of(event)
        if stage and stages.get(name) != stage:
            stages[name] = stage
            report(name, stage)

    return on_event


def _bars(progress: Progress, first: TaskID) -> EventListener:
    tasks: dict[str, TaskID] = {}

    def on_event(name: str, event: Event) -> None:
        progress.update(first, visible=False)
        if name not in tasks:
            tasks[name] = progress.add_task(f"{name}: starting", total=1.0)
        if stage := _stage_of(event):
            completed = float(event.fields.get("fraction", 1.0))
            progress.update(tasks[name], description=f"{name}: {stage}", completed=completed)

    return on_event


def _stage_of(event: Event) -> str:
    """Return what a process does, empty if the event does not state it."""
    if event.name == "progress":
        return str(_STAGES.get(event.fields["stage"], event.fields["stage"]))
    return "ready" if event.name == "ready" else ""


_SEED = "seed"
_LATE = "late tables"
_PAUSED = "speculation off"
_BACKUP = "n-grams"
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
    (_BACKUP, lambda f: f"{_percent(_share(f.backup_rounds, f.rounds))} of rounds: text repeats"),
    (_PAUSED, lambda f: f"{_percent(_share(f.paused_rounds, f.rounds))} of rounds: slower here"),
    (
        "verify / round",
        lambda f: f"{_milliseconds(f.verify_seconds)} / {_milliseconds(f.round_seconds)} ms",
    ),
    ("efficiency", lambda f: _number(f.efficiency, 2)),
)


def summary(columns: Sequence[tuple[str, Figures]], *, shows_seed: bool = False) -> Table:
    """Return a table of figures with one column for each generation.

    Figures of the target have no row if all generations are partial. Late tables, rounds of n-grams
    and rounds without speculation, because it is slower, have a row only if there were any.

    Args:
        columns: title and figures of each generation.
        shows_seed: whether the seed has a row. Greedy texts do not depend on it.
    """
    hidden = set() if shows_seed else {_SEED}
    if not any(figures.late for _, figures in columns):
        hidden.add(_LATE)
    if not any(figures.backup_rounds for _, figures in columns):
        hidden.add(_BACKUP)
    if not any(figures.paused_rounds for _, figures in columns):
        hidden.add(_PAUSED)
    are_partial = all(figures.rounds is None for _, figures in columns)
    titles = [title for title, _ in columns]
    table = plain_table("", right=titles)
    table.show_header = any(titles)
    for label, show in _ROWS:
        if label in hidden:
            continue
        cells = [show(figures) for _, figures in columns]
        if not (are_partial and all(UNKNOWN in cell for cell in cells)):
            table.add_row(Text(label, style="dim"), *cells)
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
    if figures.backup_rounds:
        share = _percent(_share(figures.backup_rounds, figures.rounds))
        parts.append(f"n-grams in {share} of rounds")
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
