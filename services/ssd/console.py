"""Consoles of the commands, their progress, and how they end with an error.

With ``NO_COLOR`` set, they write no escape sequences. rich then removes only colours: bold text,
and the cursor movements of progress, would be left.
"""

import contextlib
import io
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from typer.exceptions import TyperException

from ssd.errors import ModelNotFoundError, SettingsError, SSDError, UnsupportedModelError
from ssd.settings import did_you_mean

LINE_SECONDS = 10.0
"""Time between two lines of a stage where a bar cannot be drawn."""
BAD_INPUT = (SettingsError, ModelNotFoundError, UnsupportedModelError)
"""Errors caused by the command line: exit code 2."""
_TYPER_PREFIX = re.compile(r"^Invalid value(?: for '([^']+)')?: ")
_TYPER_PATH = re.compile(r"^(dir|file|path) ('.*' .*)\.$")
"""What typer prints about a wrong path."""


class Advance(Protocol):
    """Called with the steps since the last call."""

    def __call__(self, count: int, note: str | None = None) -> None:
        """Show them, with a note; None keeps the last one."""


class _ErrorConsole(Console):
    """Standard error: if its reader has left, a process may continue without it."""

    def on_broken_pipe(self) -> None:
        """Raise the ``BrokenPipeError``; rich would end the process."""
        raise  # noqa: PLE0704 - called while it is handled


def make_console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console for standard output, or for standard error.

    Strings have no markup, because names of models and messages can have brackets.
    """
    kind = _ErrorConsole if stderr else Console
    plain: dict[str, Any] = dict.fromkeys(("highlight", "markup", "emoji"), False)
    console = kind(stderr=stderr, soft_wrap=soft_wrap, **plain)
    if not console.no_color:
        return console
    return kind(stderr=stderr, soft_wrap=soft_wrap, color_system=None, **plain)


def prepare_streams() -> None:
    """Accept a missing standard input, which is empty, and write each character.

    Characters that the encoding of the standard output lacks are escaped, unless
    ``PYTHONIOENCODING`` says what becomes of them.
    """
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def can_redraw(console: Console) -> bool:
    """Return whether progress and live views may move the cursor."""
    return console.is_terminal and not console.no_color


@contextlib.contextmanager
def progress(
    console: Console, title: str, total: int, *, done: int = 0, note: str = ""
) -> Iterator[Advance]:
    """Show how far a stage is: a bar, or lines if the console cannot show one."""
    if can_redraw(console):
        words = TextColumn("{task.description}", markup=False)
        columns = (words, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
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
            console.print(f"{title}: {done} of {total} {last}".rstrip())

    advance(0)
    yield advance


def style_help() -> None:
    """Give the help of typer the styles of ``make_console``."""
    if Console().no_color:
        # A slow import that commands without help do not need.
        from typer import rich_utils  # noqa: PLC0415

        rich_utils.COLOR_SYSTEM = None


def run_app(app: typer.Typer, argv: Sequence[str] | None, prog_name: str) -> int:
    """Run a command line; return its exit code. An error is one line of standard error.

    ``argv`` are the arguments without the program name; None means ``sys.argv[1:]``. ``prog_name``
    is the program in help and usage errors. With ``--debug``, errors are raised,
    except usage errors.
    """
    style_help()
    prepare_streams()
    is_debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        return int(app(argv, prog_name=prog_name, standalone_mode=False) or 0)
    except TyperException as error:
        message, code = usage_problem(error, prog_name), 2
    except SSDError as error:
        if is_debug:
            raise
        message, code = str(error), 2 if isinstance(error, BAD_INPUT) else 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (BrokenPipeError, SystemExit):
        # The reader closed the pipe, for which rich and typer raise SystemExit.
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if is_debug:
            raise
        what = error.filename
        # Errors of files have a name, and those of connections a class of their own.
        if what is None and type(error) is OSError:
            what = "the output cannot be written"
            _discard_output()
        reason = error.strerror or str(error)
        message, code = f"{what}: {reason}" if what else reason, 1
    with contextlib.suppress(OSError):
        line = Text.assemble(("error:", "red"), " ", " ".join(message.split()))
        make_console(stderr=True).print(line)
    return code


def _discard_output() -> None:
    """Discard what would be flushed at exit to a standard output that cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage_problem(error: TyperException, program: str) -> str:
    """Return typer's error as one line, in the words of our own checks.

    ``program`` is the command if the error names none; its help is part of the line.
    """
    context = getattr(error, "ctx", None)
    command = program if context is None else context.command_path
    if hasattr(error, "possibilities") and context is not None:
        problem = f"{error.message}{_option_hint(getattr(error, 'option_name', ''), context)}"
    elif isinstance(error, typer.BadParameter) and error.param is not None:
        problem = _value_problem(error, error.param)
    else:
        problem = _TYPER_PREFIX.sub("", error.format_message())
    return f"{problem} (see: {command} --help)"


def _option_hint(option: str, context: typer.Context) -> str:
    """Return the nearest option, or what to do if the word is no option at all."""
    parameters = context.command.params
    options = [
        name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)
    ]
    if hint := did_you_mean(option, options, "--"):
        return hint
    has_argument = any(parameter.param_type_name == "argument" for parameter in parameters)
    return "; write -- before an argument that begins with -" if has_argument else ""


def _value_problem(error: typer.BadParameter, parameter: Any) -> str:
    """Return the parameter, its value and what is allowed."""
    # Loaded with the first value that typer converts.
    from pydantic import ValidationError  # noqa: PLC0415

    flag, cause = parameter.opts[0], error.__cause__
    if path := _TYPER_PATH.match(error.message):
        kind = {"dir": "folder"}.get(path[1], "file")
        return f"{flag}: {path[2]}; it must be a {kind}"
    if not isinstance(cause, ValidationError):
        return _TYPER_PREFIX.sub(lambda matched: f"{matched[1]}: ", error.format_message())
    detail = cause.errors()[0]
    match detail["type"].partition("_")[0]:
        case "int":
            return f"{flag} is {detail['input']!r}, must be a whole number{_range_of(parameter)}"
        case "float":
            return f"{flag} is {detail['input']!r}, must be a number{_range_of(parameter)}"
        case "less" | "greater":
            return f"{flag} is {detail['input']}, must be{_range_of(parameter)}"
    return f"{flag}: {detail['msg'].removeprefix('Value error, ').removesuffix('.')}"


def _range_of(parameter: Any) -> str:
    """Return the bounds of a number, after a space; empty without bounds."""
    bounds = parameter.type_descriptor.parameter_info
    low, high = (
        f"{bound:g}" if isinstance(bound, float) else bound for bound in (bounds.min, bounds.max)
    )
    if low is not None and high is not None:
        return f" in {low}..{high}"
    if low is not None:
        return f" at least {low}"
    return "" if high is None else f" at most {high}"
