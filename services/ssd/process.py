"""What the engine processes do alike: start, take their CPUs, own a step thread, end honestly.

A process that ends with an error logs the event ``failed`` last and writes one line into its
termination log: ``Type: message (file:line)``, 1 KiB at most, with the innermost place in this
product's code. A ``SetupError`` has no place: its message names the cause and the cure.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import ssd
from ssd.errors import (
    MemoryBudgetError,
    ModelNotFoundError,
    SettingsError,
    SetupError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)
from ssd.ports import Clock
from ssd.settings import TERMINATION_LOG, find_text, load, to_json
from ssd.telemetry import configure_logging, get_logger, log_crash, printable
from ssd.types import Peer

_log = get_logger("ssd")
SWITCH_SECONDS = 0.0005
"""How long a thread may hold the interpreter while the other one has a frame to send."""
STUCK_SECONDS = 60.0
"""A step thread that works on one step for longer is not going to finish it."""
LONGEST_LAST_WORD_BYTES = 1024
"""Of a termination log: a kubelet shares 12 KiB among the containers of a pod."""
_SOURCES = Path(ssd.__file__).parents[1]
_PROGRESS_STEPS = 25
_LASTING = (
    SettingsError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsError,
    TokenizerError,
    MemoryBudgetError,
)
"""Causes that a restart cannot mend."""
Loaded = TypeVar("Loaded")
Result = TypeVar("Result")


class _Settings(Protocol):
    """What every process can be told."""

    @property
    def log_format(self) -> str:
        """Form of log lines."""
        ...

    @property
    def termination_log(self) -> str:
        """File for the one line on why the process ended; empty for none."""
        ...


class _Placed(Protocol):
    """What a process that links to others is told of its place."""

    @property
    def pod_name(self) -> str:
        """Pod it runs in; empty outside Kubernetes."""
        ...

    @property
    def node_name(self) -> str:
        """Node it runs on; empty outside Kubernetes."""
        ...

    @property
    def cell(self) -> str:
        """Cell it belongs to; empty outside Kubernetes."""
        ...


AnySettings = TypeVar("AnySettings", bound=_Settings)


def run_process(
    name: str,
    settings_type: type[AnySettings],
    serve: Callable[[AnySettings], Coroutine[Any, Any, int]],
    check: Callable[[AnySettings], object],
    argv: Sequence[str] | None,
) -> int:
    """Read the settings ``SSD_<NAME>_*`` and serve; the result is the exit code.

    With ``--print-config`` the settings are checked and printed instead. A cause that a person has
    to mend is one line, in the log and in the termination log: exit code 78 (``EX_CONFIG``) if a
    restart would find it again, 1 for anything else. What is not expected is raised: the hook that
    is set here logs its stack, and the interpreter leaves with 1.
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
    sys.excepthook = crash_hook(settings.termination_log)
    threading.excepthook = log_crash
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        if loaded.is_only_shown:
            check(settings)
            sys.stdout.write(to_json(settings) + "\n")
            return 0
        return asyncio.run(serve(settings))
    except SetupError as error:
        return _fail(error, settings.termination_log)


def log_progress(stage: str, fraction: float) -> None:
    """Log how far a stage of the start is, 0..1. Any thread."""
    _log.info("progress", stage=stage, fraction=round(fraction, 3))


def progress_log() -> Callable[[str, float], None]:
    """Return a callback that logs each stage in steps of 4 %.

    A model has thousands of tensors, and ``RepeatLimit`` drops an event that repeats too often.
    """
    logged: dict[str, int] = {}

    def report(stage: str, fraction: float) -> None:
        step = int(fraction * _PROGRESS_STEPS)
        if logged.get(stage) != step:
            logged[stage] = step
            log_progress(stage, fraction)

    return report


def peer(settings: _Placed, weights_fingerprint: str) -> Peer:
    """Where this process runs, and what, for those it links to."""
    return Peer(
        pod=settings.pod_name or f"{socket.gethostname()}:{os.getpid()}",
        node=settings.node_name,
        cell=settings.cell,
        weights_fingerprint=weights_fingerprint,
    )


async def run_until_signal(run: Coroutine[Any, Any, None], leave: Callable[[], None]) -> int:
    """Run a process until SIGTERM or SIGINT; returns its exit code.

    Raises:
        Exception: what ended it.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    await run
    _log.info("stopped", code=0)
    return 0


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


class Watchdog:
    """Tells a step thread that works, or has nothing to do, from one that hangs. Any thread.

    The step thread beats once a step, and rests while it waits for something to do.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy_since: float | None = None

    def beat(self) -> None:
        """A step begins."""
        self._busy_since = self._clock.now()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, the thread waits: nothing is expected of it."""
        self._busy_since = None
        yield
        self.beat()

    @property
    def is_stuck(self) -> bool:
        """Whether there has been work, and no progress with it, for ``STUCK_SECONDS``."""
        busy_since = self._busy_since
        return busy_since is not None and self._clock.now() - busy_since > STUCK_SECONDS


async def in_daemon_thread(call: Callable[[], Result]) -> Result:
    """Wait for a call in a thread of its own, which nobody waits for when the process ends.

    For calls that may never return. The loop's own executor has few threads and is joined.

    Raises:
        Exception: what the call raised.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def tell(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not answer.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            post(loop, tell, answer.set_exception, error)
        else:
            post(loop, tell, answer.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await answer


class StepThread(Generic[Loaded]):
    """A thread with one life: load, serve, end. Asyncio loop, but for ``_run``.

    ``loaded`` has what ``load`` returned first, or the error that prevented it; ``ended`` is set
    when the thread is over, with the error that ended it while it served.
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
        self.ended: asyncio.Future[None] = self._loop.create_future()
        # A daemon: a forward pass that never returns must not keep a crashed process alive.
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._load_and_serve()
        except Exception as raised:  # noqa: BLE001 - raised again where it is waited for
            error = raised
        finally:
            self._on_end()
            post(self._loop, self._end, error)

    def _load_and_serve(self) -> None:
        os.sched_setaffinity(0, self._cpus)
        loaded, serve = self._load()
        # What was imported and loaded lives as long as the process: collections need not walk it.
        gc.collect()
        gc.freeze()
        post(self._loop, self.loaded.set_result, loaded)
        serve()

    def _end(self, error: Exception | None) -> None:
        """The thread is over. Asyncio loop."""
        if error is not None and not self.loaded.done():
            self.loaded.set_exception(error)
            error = None
        if error is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


def crash_hook(
    termination_log: str,
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """Return what reports an error that was not handled; for ``sys.excepthook``."""

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not issubclass(kind, Exception):
            # Ctrl-C before anything serves.
            sys.__excepthook__(kind, error, trace)
            return
        _write_last_word(last_word(error), termination_log)
        name, message = kind.__name__, _one_line(error)
        _log.crash("failed", error, error=name, message=message, place=place_of(error))

    return report


def last_word(error: BaseException) -> str:
    """Return the line of a termination log: ``Type: message (file:line)``, 1 KiB at most.

    A ``SetupError`` has no place; see the module. The message is cut, the place is not.
    """
    place = "" if isinstance(error, SetupError) else place_of(error)
    end = f" ({place})" if place else ""
    room = LONGEST_LAST_WORD_BYTES - len(end.encode())
    words = f"{type(error).__name__}: {_one_line(error)}".encode()[:room].decode(errors="ignore")
    return words + end


def place_of(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame of this product's code; empty if there is none.

    The file is relative to where the packages are: ``ssd/engine/runner.py:120``.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_SOURCES):
            inner = path.relative_to(_SOURCES)
            # Installed, the packages stand beside those of others.
            if inner.parts[0] == "ssd" or inner.parts[0].startswith("ssd_"):
                return f"{inner}:{frame.lineno}"
    return ""


def _fail(error: SetupError, termination_log: str) -> int:
    _write_last_word(last_word(error), termination_log)
    _log.error("failed", error=type(error).__name__, message=_one_line(error))
    return os.EX_CONFIG if isinstance(error, _LASTING) else 1


def _one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).encode(errors="replace").decode().split()))


def _write_last_word(word: str, termination_log: str) -> None:
    is_absent = termination_log == TERMINATION_LOG and not os.access(TERMINATION_LOG, os.W_OK)
    if not termination_log or is_absent:
        return
    try:
        Path(termination_log).write_bytes(word.encode())
    except OSError as unwritten:
        _log.warning("termination_log_not_written", reason=str(unwritten))
