"""What the commands share: checks of flags, and the end of a command with an error."""

import asyncio
import shutil
import sys
from collections.abc import Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import typer

from ssd.engine.config import ModelConfig
from ssd.errors import (
    AccessError,
    IncompleteTextError,
    ModelNotFoundError,
    NotReadyError,
    RequestError,
    SettingsError,
    SSDError,
    UnsupportedModelError,
)
from ssd.model_files.folder_contents import problem_of
from ssd.model_files.model_name import local_folder
from ssd.runtime.launch import Deployment
from ssd.settings import find_text
from ssd_cli.display import report
from ssd_cli.extras import how_to_install, missing_module
from ssd_cli.sampling_options import flag_problem
from ssd_cli.shapes import check_pair, downloaded_shape

debug_of_app: ContextVar[bool] = ContextVar("debug_of_app", default=False)
"""Whether ``--debug`` stands before or after the name of the command."""
NAME = "ssd"
"""Name of the program that the package installs."""
BAD_INPUT = (RequestError, SettingsError, ModelNotFoundError)
"""Errors caused by the command line: exit code 2."""


def program(path: str | None = None) -> str:
    """Return how a user runs this command, for hints.

    Args:
        path: of the program, as the user typed it; None: that of this process.
    """
    path = path or sys.argv[0]
    name = Path(path).name
    if Path(path).parts[-2:] == ("ssd_cli", "__main__.py"):
        return "python -m ssd_cli"
    installed = shutil.which(NAME)
    is_on_path = installed is not None and Path(path).exists() and Path(installed).samefile(path)
    return NAME if name != NAME or is_on_path else path


def check_extras(*extras: str) -> None:
    """Report a package that is missing, and end the command with 1."""
    if module := missing_module(extras):
        report("error", how_to_install(module, ("cli", *extras)), "red")
        raise typer.Exit(1)


def check_folder() -> None:
    """Refuse a current folder that was deleted, in which libraries of the processes fail.

    Raises:
        SettingsError: it no longer exists.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise SettingsError("the current folder no longer exists: change to another one") from None


def check_models(deployment: Deployment) -> None:
    """Refuse wrong models and sizes before a process starts, which would need seconds for it.

    Packages that the processes need, and the current folder, are checked too.
    """
    check_folder()
    check_extras("engine", *(() if deployment.gateway_port is None else ("gateway",)))
    models = {"--target": deployment.target}
    if deployment.num_drafts or deployment.is_synchronous:
        models["--draft"] = deployment.draft
    shapes: dict[str, ModelConfig | None] = {}
    for flag, model in models.items():
        try:
            shapes[flag] = downloaded_shape(model)
        except (ModelNotFoundError, UnsupportedModelError) as error:
            raise typer.BadParameter(f"{flag} {error}") from None
        folder = local_folder(model)
        if folder is not None and (problem := problem_of(folder)):
            raise typer.BadParameter(f"{flag} {problem}")
    try:
        warning = check_pair(shapes["--target"], shapes.get("--draft"), _num_ranks(deployment))
    except SettingsError as error:
        raise typer.BadParameter(f"--target {deployment.target}: {error}") from None
    if warning:
        report("warning", warning)
    if deployment.num_drafts and deployment.plan().is_shared:
        report("warning", "target and drafts share one CPU; expect no speed-up")


def _num_ranks(deployment: Deployment) -> int:
    """Return the ranks of the target; 1 if they are not a number, which the target refuses."""
    flags = deployment.target_flags
    text = find_text("tensor_parallel_size", flags, prefix="SSD_TARGET", default="1")
    return int(text) if text.isdecimal() else 1


def run_work(work: Coroutine[Any, Any, Any], *, is_debug: bool) -> Any:
    """Run a command; print an ``SSDError`` on one line and convert it to an exit code.

    ``is_debug`` is the flag after the name of the command.
    """
    flag = debug_of_app.set(debug_of_app.get() or is_debug)
    try:
        return asyncio.run(work)
    except SSDError as error:
        if debug_of_app.get():
            raise
        report("error", _with_hint(error), "red")
        raise typer.Exit(2 if isinstance(error, BAD_INPUT) else 1) from None
    finally:
        debug_of_app.reset(flag)


def _with_hint(error: SSDError) -> str:
    if isinstance(error, NotReadyError) and not isinstance(error, IncompleteTextError):
        return f"{error} ('{program()} up' starts a target and prints its address)"
    if isinstance(error, AccessError):
        return f"{error} (--token-file and --tls-ca give the credentials)"
    has_stack = bool(getattr(error, "__notes__", ()))
    hint = " (--debug shows the output of the process)" if has_stack else ""
    return flag_problem(error) + hint
