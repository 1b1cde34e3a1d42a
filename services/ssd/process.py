"""What the engine processes do alike: start, take their CPUs, own a step thread, end honestly."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

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
from ssd.settings import find_text, load, to_json
from ssd.telemetry import configure_logging, get_logger, log_crash
from ssd.types import Peer

_log = get_logger("ssd")
SWITCH_SECONDS = 0.0005
"""How long a thread may hold the interpreter while the other one has a frame to send."""
STUCK_SECONDS = 60.0
"""A step thread that works on one step for longer is not going to finish it."""
LONGEST_LAST_WORD_BYTES = 4096
"""What a kubelet reads of a termination log."""
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
        """File that is told why the process could not start; empty for none."""
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
    restart would find it again, 1 for anything else.
    """
    argv = sys.argv[1:] if argv is None else argv
    prefix = f"SSD_{name.upper()}"
    try:
        loaded = load(settings_type, argv, prefix=prefix)
    except SettingsError as error:
        configure_logging("json", name)
        return _fail(error, find_text("termination_log", argv, prefix=prefix))
    settings = loaded.settings
    configure_logging(settings.log_format, name)
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
    """Say how far loading is. Any thread."""
    _log.info("progress", stage=stage, fraction=round(fraction, 3))


def peer(settings: _Placed, weights_fingerprint: str) -> Peer:
    """Where this process runs, and what, for those it links to."""
    return Peer(
        pod=settings.pod_name or f"{socket.gethostname()}:{os.getpid()}",
        node=settings.node_name,
        cell=settings.cell,
        weights_fingerprint=weights_fingerprint,
    )


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


class Pulse:
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


def _fail(error: SetupError, termination_log: str) -> int:
    kind, message = type(error).__name__, " ".join(str(error).split())
    _log.error("failed", error=kind, message=message)
    if termination_log:
        line = f"{kind}: {message}".encode()[:LONGEST_LAST_WORD_BYTES]
        try:
            Path(termination_log).write_bytes(line)
        except OSError as unwritten:
            _log.warning("termination_log_not_written", reason=str(unwritten))
    return os.EX_CONFIG if isinstance(error, _LASTING) else 1
