"""Escape sequences of consoles, with and without ``NO_COLOR``."""

import io

import pytest
from rich.console import Console
from rich.text import Text
from typer import rich_utils

from ssd.console import can_redraw, make_console, progress, style_help


class Terminal(io.StringIO):
    """A standard output that a terminal shows."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, no_color: str) -> Terminal:
    for name, value in {"TERM": "xterm", "NO_COLOR": no_color, "COLORTERM": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    return screen


def test_a_terminal_receives_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch, "")
    console = make_console()
    console.print(Text("a", style="bold red"))
    assert screen.getvalue() == "\x1b[1;31ma\x1b[0m\n"
    assert can_redraw(console)


def test_with_no_color_a_terminal_receives_no_escape_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = terminal(monkeypatch, "1")
    console = make_console()
    console.print(Text("a", style="bold red"))
    assert screen.getvalue() == "a\n"
    assert console.is_terminal
    assert not can_redraw(console)


@pytest.mark.parametrize(("no_color", "system"), [("", "auto"), ("1", None)])
def test_help_follows_no_color(
    no_color: str, system: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(rich_utils, "COLOR_SYSTEM", "auto")
    style_help()
    assert system == rich_utils.COLOR_SYSTEM


def test_without_a_terminal_progress_is_lines() -> None:
    screen = io.StringIO()
    with progress(Console(file=screen), "batches", 3, note="starting") as advance:
        for _ in range(3):
            advance(1, "")
    assert screen.getvalue() == "batches: 0 of 3 starting\nbatches: 3 of 3\n"
