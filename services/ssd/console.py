"""Consoles of the commands. With ``NO_COLOR`` set, they write no escape sequences.

rich then removes only colours: bold text, and the cursor movements of progress, would be left.
"""

from rich.console import Console


def make_console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console for standard output, or for standard error."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=soft_wrap)
    if not console.no_color:
        return console
    return Console(stderr=stderr, highlight=False, soft_wrap=soft_wrap, color_system=None)


def can_redraw(console: Console) -> bool:
    """Return whether progress and live views may move the cursor."""
    return console.is_terminal and not console.no_color


def style_help() -> None:
    """Give the help of typer the styles of ``make_console``."""
    if Console().no_color:
        # A slow import that commands without help do not need.
        from typer import rich_utils  # noqa: PLC0415

        rich_utils.COLOR_SYSTEM = None
