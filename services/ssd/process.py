"""What the engine processes do alike: start, take their CPUs, own a step thread, end honestly."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ssd.errors import SettingsError, SetupError
from ssd.settings import load
from ssd.telemetry import configure_logging, get_logger, log_crash

_log = get_logger("ssd")
SWITCH_SECONDS = 0.0005
"""How long a thread may hold the interpreter while the other one has a frame to send."""
Progress = Callable[[str, float], None]
Loaded = TypeVar("Loaded")


class _Settings(Protocol):
    """What every process can be told."""

    @property
    def log_format(self) -> str:
        """Form of log lines."""
        ...


AnySettings = TypeVar("AnySettings", bound=_Settings)


def run_process(
    name: str,
    settings_type: type[AnySettings],
    serve: Callable[[AnySettings], Coroutine[Any, Any, int]],
    argv: Sequence[str] | None,
) -> int:
    """Read the settings ``SSD_<NAME>_*`` and serve; the result is the exit code.

    A cause that a person has to mend is one log line: 2 for settings, 1 for anything else.
    """
    try:
        loaded = load(
            settings_type, sys.argv[1:] if argv is None else argv, prefix=f"SSD_{name.upper()}"
        )
    except SettingsError as error:
        configure_logging("json", name)
        return _fail(error)
    configure_logging(loaded.settings.log_format, name)
    threading.excepthook = log_crash
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        return asyncio.run(serve(loaded.settings))
    except SetupError as error:
        return _fail(error)


async def run_until_signal(run: Coroutine[Any, Any, int], leave: Callable[[], None]) -> int:
    """Run a process that is told to leave by SIGTERM or SIGINT; returns its exit code."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    code = await run
    _log.info("stopped", code=code)
    return code


def pin(step_cpus: frozenset[int], other_cpus: frozenset[int]) -> frozenset[int]:
    """Put this thread, and those it will start, on ``other_cpus``; empty for all.

    Returns:
        The CPUs of the step thread, which puts itself there: ``step_cpus``, or all.

    Raises:
        SettingsError: a CPU that this process may not use.
    """
    allowed = os.sched_getaffinity(0)
    missing = (step_cpus | other_cpus) - allowed
    if missing:
        raise SettingsError(f"CPUs {sorted(missing)} are not among the allowed {sorted(allowed)}")
    if other_cpus:
        os.sched_setaffinity(0, other_cpus)
    return step_cpus or frozenset(allowed)


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Have the loop call something; nothing happens if it is closed, since nobody listens then.

    For threads that must go on to their own end while the process goes down.
    """
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


class StepThread(Generic[Loaded]):
    """A thread with one life: load, serve, end. Asyncio loop, but for ``_run``.

    ``loaded`` has what ``load`` returned first, or the ``SetupError`` that prevented it; ``ended``
    is set when the thread is over, with False if it crashed.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Loaded, Callable[[], None]]],
        on_end: Callable[[], None],
        cpus: Collection[int],
    ) -> None:
        """Prepare the thread.

        Args:
            load: returns what is announced and what then serves until the inbox is closed.
            on_end: called last on the thread, however it ends.
            cpus: where it runs.
        """
        self._load = load
        self._on_end = on_end
        self._cpus = cpus
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self.ended: asyncio.Future[bool] = self._loop.create_future()
        # A daemon: a forward pass that never returns must not keep a crashed process alive.
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def _run(self) -> None:
        ended_well = False
        # What is raised here goes to threading.excepthook, which logs it.
        try:
            ended_well = self._load_and_serve()
        finally:
            self._on_end()
            post(self._loop, self.ended.set_result, ended_well)

    def _load_and_serve(self) -> bool:
        os.sched_setaffinity(0, self._cpus)
        try:
            loaded, serve = self._load()
        except SetupError as error:
            post(self._loop, self.loaded.set_exception, error)
            return False
        # What was imported and loaded lives as long as the process: collections need not walk it.
        gc.collect()
        gc.freeze()
        post(self._loop, self.loaded.set_result, loaded)
        serve()
        return True


def _fail(error: SetupError) -> int:
    _log.error("failed", error=type(error).__name__, message=str(error))
    return 2 if isinstance(error, SettingsError) else 1
