"""Start and exit of a process: settings, logging, signals, exit code, termination log.

A process that ends with an error logs the event ``failed`` last and writes one line into its
termination log: ``Type: message (file:line)``, 1 KiB at most, with the innermost place in this
product's code. A ``SetupError`` has no place: its message names the cause and the fix.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import ssd
from ssd.engine_settings import EngineSettings
from ssd.errors import (
    MemoryBudgetError,
    ModelNotFoundError,
    SettingsError,
    SetupError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)
from ssd.observability.log import configure_logging, get_logger, log_crash, printable
from ssd.runtime.cpu_plan import SHORT_SLICE_SECONDS, set_slice
from ssd.runtime.threads import is_step_thread_running
from ssd.settings import TERMINATION_LOG, find_text, load, to_json
from ssd.types import Peer

_log = get_logger("ssd")
SWITCH_SECONDS = 0.0005
"""Maximum time that a thread holds the interpreter while another one waits for it."""
MAX_TERMINATION_BYTES = 1024
"""Bytes of a termination log: a kubelet shares 12 KiB among the containers of a pod."""
_SOURCES = Path(ssd.__file__).parents[1]
_PERMANENT = (
    SettingsError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsError,
    TokenizerError,
    MemoryBudgetError,
)
"""Causes that a restart does not remove."""


class _Settings(Protocol):
    """Settings of every process."""

    @property
    def log_format(self) -> str:
        """Form of log lines."""

    @property
    def termination_log(self) -> str:
        """File that receives the cause of the end in one line; empty for none."""


AnySettings = TypeVar("AnySettings", bound=_Settings)


def run_process(
    name: str,
    settings_type: type[AnySettings],
    serve: Callable[[AnySettings], Coroutine[Any, Any, int]],
    check: Callable[[AnySettings], object],
    argv: Sequence[str] | None,
) -> int:
    """Read the settings ``SSD_<NAME>_*`` and serve; the result is the exit code.

    With ``--print-config`` the settings are checked and printed instead. A ``SetupError`` is one
    line in the log and in the termination log. Its exit code is 78 (``EX_CONFIG``) if a restart
    would fail in the same way, else 1. Any other error is raised: the hook that is set here logs
    its stack, and the interpreter exits with 1.
    """
    argv = sys.argv[1:] if argv is None else argv
    prefix = f"SSD_{name.upper()}"
    try:
        loaded = load(settings_type, argv, prefix=prefix)
    except SettingsError as error:
        configure_logging("json", name)
        path = find_text("termination_log", argv, prefix=prefix, default=TERMINATION_LOG)
        return _fail(error, path)
    settings = loaded.settings
    configure_logging(settings.log_format, name)
    sys.excepthook = partial(report_crash, settings.termination_log)
    threading.excepthook = log_crash
    sys.setswitchinterval(SWITCH_SECONDS)
    set_slice(SHORT_SLICE_SECONDS)
    try:
        if loaded.is_only_shown:
            check(settings)
            sys.stdout.write(to_json(settings) + "\n")
            return 0
        return asyncio.run(serve(settings))
    except SetupError as error:
        return _fail(error, settings.termination_log)


def peer(settings: EngineSettings, weights_fingerprint: str) -> Peer:
    """Describe this process to the other end of its links."""
    return Peer(
        pod=settings.pod_name or f"{socket.gethostname()}:{os.getpid()}",
        node=settings.node_name,
        cell=settings.cell,
        weights_fingerprint=weights_fingerprint,
    )


async def run_until_signal(run: Coroutine[Any, Any, None], drain: Callable[[], object]) -> int:
    """Run a process, which drains at SIGTERM or SIGINT; returns the exit code.

    Raises:
        Exception: what ended it.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    await run
    _log.info("stopped", code=0)
    return 0


def exit_process(code: int) -> NoReturn:
    """Exit with a code, also while a step thread still runs. Main thread."""
    _exit_beside_step_thread(code)
    sys.exit(code)


def _exit_beside_step_thread(code: int) -> None:
    """Exit at once if a step thread still exists: it loads, hangs, or has just ended; else return.

    Nothing that is registered with ``atexit`` runs then; the log is written before.

    The end of the interpreter unwinds the stacks of threads that still run. C++ code of a library
    on such a stack calls ``terminate``, and the exit code would be that of SIGABRT.
    """
    if is_step_thread_running():
        logging.shutdown()
        os._exit(code)


def report_crash(
    termination_log: str,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Report an unhandled error, for ``sys.excepthook``; ends beside a step thread that runs."""
    if not issubclass(kind, Exception):
        # Ctrl-C before the process serves.
        sys.__excepthook__(kind, error, trace)
        return
    _write_termination_log(termination_message(error), termination_log)
    name, message, place = kind.__name__, _one_line(error), place_of(error)
    _log.error("failed", exc_info=error, error=name, message=message, place=place)
    _exit_beside_step_thread(1)


def termination_message(error: BaseException) -> str:
    """Return the line of a termination log: ``Type: message (file:line)``, 1 KiB at most.

    A long message is cut; the place is kept. A ``SetupError`` has no place.
    """
    place = "" if isinstance(error, SetupError) else place_of(error)
    end = f" ({place})" if place else ""
    room = MAX_TERMINATION_BYTES - len(end.encode())
    cause = f"{type(error).__name__}: {_one_line(error)}".encode()[:room].decode(errors="ignore")
    return cause + end


def place_of(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame of this product's code; empty if there is none.

    The file is relative to the folder of the packages: ``ssd/engine/runner.py:120``.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_SOURCES):
            inner = path.relative_to(_SOURCES)
            # In an installation, other packages are in the same folder.
            if inner.parts[0] == "ssd" or inner.parts[0].startswith("ssd_"):
                return f"{inner}:{frame.lineno}"
    return ""


def _fail(error: SetupError, termination_log: str) -> int:
    _write_termination_log(termination_message(error), termination_log)
    _log.error("failed", error=type(error).__name__, message=_one_line(error))
    return os.EX_CONFIG if isinstance(error, _PERMANENT) else 1


def _one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).encode(errors="replace").decode().split()))


def _write_termination_log(message: str, termination_log: str) -> None:
    is_absent = termination_log == TERMINATION_LOG and not os.access(TERMINATION_LOG, os.W_OK)
    if not termination_log or is_absent:
        return
    try:
        Path(termination_log).write_bytes(message.encode())
    except OSError as error:
        _log.warning("termination_log_not_written", reason=str(error))
