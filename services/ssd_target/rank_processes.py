"""The processes of ranks 1, 2...: the target starts them, watches them, and ends with them.

A model on several ranks cannot continue without one of them. The first rank that ends, or a rank
that does not answer in time, ends the target with an error that names the rank. So does a step that
takes too long on some rank, whether it waits for its device, for a collective or for nothing.
"""

import asyncio
import contextlib
import faulthandler
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ssd.engine.parallel.group import (
    ALONE,
    HOST,
    SERVICE_SECONDS,
    STEP_DEADLINES,
    Group,
    join,
)
from ssd.engine.parallel.shard import Shard
from ssd.engine.runner import require_device
from ssd.errors import RankError, SetupError
from ssd.model_files.local_model import LocalModel
from ssd.observability.log import Event, get_logger
from ssd.runtime.cpu_plan import divide
from ssd.runtime.launch import ChildProcess
from ssd.runtime.step_thread import Watchdog
from ssd_target.rank import LOST, POLL_SECONDS, STUCK, rank_flags

_log = get_logger("ssd_target")
MODULE = "ssd_target.rank"
JUDGE_SECONDS = 2.0
"""After the first sign of a failure, ranks that have lost another one end within this time."""
STEP_SECONDS = STEP_DEADLINES * SERVICE_SECONDS
"""A step of rank 0 that takes longer hangs. Other ranks report such steps themselves."""
END_SECONDS = 3.0
"""The target ends with exit code 1 this long after it has named the rank, whatever hangs."""
_OWN_FIELDS = ("ts", "level", "process")
"""Fields that each log line has."""


class RankProcesses:
    """All ranks of a target except rank 0, which is the target itself. Asyncio loop.

    There are none if the model is not split.
    """

    def __init__(self, model: LocalModel, cpus: Collection[int], watchdog: Watchdog) -> None:
        """Construct the ranks, which divide ``cpus``; rank 0 has ``watchdog``."""
        self._model = model
        self._size = model.engine.tensor_parallel_size
        self._cpus = divide(cpus, self._size)
        self._listener: socket.socket | None = None
        self._children: list[ChildProcess] = []
        self._ends: list[asyncio.Task[int]] = []
        self._cause: Exception | None = None
        self._watchdog = watchdog
        self._stuck: dict[int, float] = {}
        """Other ranks that have reported a step that takes too long, with its seconds so far."""

    @property
    def cpus(self) -> frozenset[int]:
        """CPUs of rank 0."""
        return self._cpus[0]

    def join(self) -> Group:
        """Wait for all ranks and return them as a group. Step thread; once.

        Raises:
            SettingsError: rank 0 has no such device.
            RankError: a rank did not connect in time.
        """
        if self._listener is None:
            return ALONE
        port = self._listener.getsockname()[1]
        device = rank_device(self._model.engine.device, 0)
        require_device(device)
        return join(Shard(0, self._size), port, device, self._listener.detach())

    @contextlib.asynccontextmanager
    async def running(
        self, step: asyncio.Future[None], on_failure: Callable[[Exception], None]
    ) -> AsyncIterator[None]:
        """Inside, all ranks run; afterwards, none.

        Args:
            step: the end of the step thread, which is a ``RankError`` if it has lost a rank.
            on_failure: called if a rank ends or does not answer, with an error that names it.

        Raises:
            SetupError: a rank could not load its part.
            RankError: a rank has ended or does not answer; the message names it.
        """
        if self._size == 1:
            yield
            return
        async with contextlib.AsyncExitStack() as stack:
            self._listener = stack.enter_context(socket.create_server((HOST, 0)))
            stack.push_async_callback(self._kill)
            await self._start(self._listener.getsockname()[1])
            watch = asyncio.create_task(self._watch(step, on_failure))
            stack.callback(watch.cancel)
            try:
                yield
            except RankError as error:
                on_failure(cause := await self._find_cause())
                # The end of the interpreter can wait for a device that waits for another rank.
                faulthandler.dump_traceback_later(END_SECONDS, exit=True)
                raise cause from (None if error is cause else error)

    async def _start(self, port: int) -> None:
        engine = self._model.engine
        for rank in range(1, self._size):
            own = replace(engine, device=rank_device(engine.device, rank))
            cpus = ",".join(map(str, sorted(self._cpus[rank])))
            flags = rank_flags(self._model.folder, own, rank, port, cpus)
            child = ChildProcess(f"rank {rank}", MODULE, flags, partial(self._on_event, rank))
            await child.start()
            _log.info("rank_started", rank=rank, pid=child.pid, device=own.device, cpus=cpus)
            self._children.append(child)
            self._ends.append(asyncio.create_task(child.wait()))

    async def _watch(
        self, step: asyncio.Future[None], on_failure: Callable[[Exception], None]
    ) -> None:
        stuck = asyncio.create_task(self._until_stuck())
        ends: set[asyncio.Future[Any]] = {*self._ends, step, stuck}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stuck.cancel()
        if not step.done() or isinstance(step.exception(), RankError):
            on_failure(await self._find_cause())

    async def _until_stuck(self) -> None:
        """Wait for a rank whose step takes too long."""
        while not self._stuck_ranks:  # noqa: ASYNC110 - a thread that hangs sets no event
            await asyncio.sleep(POLL_SECONDS)

    @property
    def _stuck_ranks(self) -> dict[int, float]:
        is_stuck = self._watchdog.busy_seconds > STEP_SECONDS
        mine = {0: STEP_SECONDS} if is_stuck else {}
        return mine | dict(sorted(self._stuck.items()))

    async def _find_cause(self) -> Exception:
        """Return the error of the rank that has failed, once one has failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JUDGE_SECONDS):
                while None in self._codes and not _ended_first(self._codes):
                    running = [end for end in self._ends if not end.done()]
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if self._cause is None:
            stuck = self._stuck_ranks if set(self._codes) == {None} else {}
            self._cause = stuck_error(stuck) if stuck else self._error_of(failed_rank(self._codes))
            _log.error("rank_failed", reason=str(self._cause))
        return self._cause

    @property
    def _codes(self) -> list[int | None]:
        """Exit codes of ranks 1, 2...; None of a rank that runs."""
        return [end.result() if end.done() else None for end in self._ends]

    def _error_of(self, rank: int) -> Exception:
        child = self._children[rank - 1] if rank else None
        if child is None or not self._ends[rank - 1].done():
            return RankError(f"rank {rank} does not answer the other ranks")
        failure = child.failure()
        if type(failure) is not SetupError:
            return failure
        error = RankError(str(failure))
        for note in getattr(failure, "__notes__", ()):
            error.add_note(note)
        return error

    def _on_event(self, rank: int, name: str, event: Event) -> None:
        """Log the warnings of a rank. Its error becomes the error of the target."""
        if event.name == STUCK:
            self._stuck[rank] = float(event.fields["seconds"])
        if event.fields.get("level") == "warning":
            fields = {key: value for key, value in event.fields.items() if key not in _OWN_FIELDS}
            _log.warning(event.name, rank=name, **fields)

    async def _kill(self) -> None:
        """End all ranks; they have nothing to finish."""
        for child in self._children:
            child.kill()
        await asyncio.gather(*self._ends)


def failed_rank(codes: Sequence[int | None]) -> int:
    """Return the rank that caused the end of the others.

    Args:
        codes: exit code of ranks 1, 2...; None of a rank that still runs although another one has
            ended or has waited for it too long.

    Returns:
        The first rank that ended for a reason of its own, else the first that still runs. Else all
        others lost rank 0.
    """
    ended, still_running = _ended_first(codes), codes.count(None)
    if ended:
        return ended
    if still_running:
        return codes.index(None) + 1
    aborted = [rank for rank, code in enumerate(codes, 1) if code == -signal.SIGABRT]
    return aborted[0] if aborted else 0


def stuck_error(ranks: Mapping[int, float]) -> RankError:
    """Return the error of ranks whose step takes too long while all ranks run.

    Args:
        ranks: the time of the step by rank, in seconds. It is longer before the target is ready.
    """
    names, seconds = ", ".join(map(str, ranks)), min(ranks.values())
    if len(ranks) == 1:
        return RankError(f"rank {names} hangs: it did not end a step within {seconds:g} s")
    return RankError(
        f"ranks {names} did not end a step within {seconds:g} s: one of them hangs in an "
        "operation of its device, and the others wait for it"
    )


def _ended_first(codes: Sequence[int | None]) -> int:
    """Return the first rank that ended for a reason of its own; 0 if there is none."""
    # NCCL aborts a process that has waited too long for another one.
    after_others = (None, LOST, -signal.SIGABRT)
    return next((rank for rank, code in enumerate(codes, 1) if code not in after_others), 0)


def rank_device(device: str, rank: int) -> str:
    """Return the device of a rank: the CPU, or a GPU counted from the GPU of the settings."""
    kind, _, index = device.partition(":")
    return device if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"
