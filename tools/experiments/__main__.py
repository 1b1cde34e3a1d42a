"""``python -m tools.experiments``: the command line of the experiments."""

import sys
from collections.abc import Sequence

import typer
from tools.experiments.auto import auto
from tools.experiments.cpu_draft import cpu_draft
from tools.experiments.slow_draft import slow_draft

from ssd.console import run_app


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code. The arguments are those of ``run_app``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    for command in (auto, cpu_draft, slow_draft):
        app.command()(command)
    return run_app(app, argv, "python -m tools.experiments")


if __name__ == "__main__":
    sys.exit(main())
