"""Which resource has a pass when: debounced, one pass at a time, retried with back-off.

``Schedule`` decides and only has its own state; ``WorkQueue`` runs the passes.

*Decision*: jitter is a hash of the key and the number of tries. *Because* two hundred resources
that failed together must not come back together, and a test must see the same delays twice.
"""

import asyncio
import contextlib
import contextvars
import itertools
import math
import traceback
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from ssd.telemetry import bound_fields, get_logger
from ssd_operator.observe.cluster import ClusterError, Key
from ssd_operator.runtime import metrics

DEBOUNCE_SECONDS = 0.05
"""Events that come together are one pass."""
SETTLE_SECONDS = 1.0
"""Time without a further change of a resource before its next pass. Each pass may begin to replace
pods, so 21 edits in 5 s must not be 21 rollouts."""
LONGEST_SETTLE_SECONDS = 10.0
"""Maximum delay by changes that do not end."""
RESYNC_SECONDS = 30.0
"""Longest time between two passes, with a fifth more or less."""
_RESYNC_SPREAD = 0.2
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
PASS_SECONDS = 120.0
"""Longest pass; each of its calls has a shorter deadline of its own."""

_log = get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    """One key. Times are seconds of one clock."""

    since: float
    """First wake, or the first one after the last pass that succeeded."""
    due: float = math.inf
    is_running: bool = False
    num_failures: int = 0
    not_before: float = -math.inf
    """Time of the retry of a key that failed."""
    changed_at: float = math.inf
    """First change of the resource after the begin of its last pass."""
    settled_at: float = -math.inf
    """When these changes have settled."""


class Schedule:
    """When which key is due."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}

    def wake(self, key: Key, now: float, after: float = DEBOUNCE_SECONDS) -> None:
        """Let a key be due soon; one that failed keeps waiting for its retry."""
        entry = self._entries.setdefault(key, _Entry(now))
        entry.due = min(entry.due, max(now + after, entry.not_before, entry.settled_at))

    def change(self, key: Key, now: float) -> None:
        """The resource itself was changed: a pass is due when the changes have settled.

        It does not wait for a retry: the change may correct what the key failed for.
        """
        entry = self._entries.setdefault(key, _Entry(now))
        entry.num_failures, entry.not_before, entry.due = 0, -math.inf, math.inf
        entry.changed_at = min(entry.changed_at, now)
        entry.settled_at = min(now + SETTLE_SECONDS, entry.changed_at + LONGEST_SETTLE_SECONDS)
        self.wake(key, now, 0.0)

    def take(self, now: float) -> Key | None:
        """The key that is due for longest and has no pass; None if there is none."""
        waiting = {key: each.due for key, each in self._entries.items() if not each.is_running}
        key = min(waiting, key=lambda each: waiting[each], default=None)
        if key is None or waiting[key] > now:
            return None
        entry = self._entries[key]
        entry.due, entry.is_running = math.inf, True
        entry.changed_at, entry.settled_at = math.inf, -math.inf
        return key

    def finish(self, key: Key, now: float, again_after: float | None) -> None:
        """A pass has succeeded; None for a key that is gone."""
        before = self._entries.pop(key)
        if before.due < math.inf or again_after is not None:
            self._entries[key] = _Entry(
                now, before.due, changed_at=before.changed_at, settled_at=before.settled_at
            )
        if again_after is not None:
            resync = RESYNC_SECONDS * (1 + _RESYNC_SPREAD * (2 * _jitter(key, int(now)) - 1))
            self.wake(key, now, max(min(again_after, resync), DEBOUNCE_SECONDS))

    def fail(self, key: Key, now: float, retry_after_seconds: float = 0.0) -> float:
        """A pass has failed; returns the seconds until its retry."""
        entry = self._entries[key]
        entry.is_running, entry.due = False, math.inf
        entry.num_failures += 1
        pause = FIRST_RETRY_SECONDS * 2.0 ** min(entry.num_failures - 1, 10)
        pause = min(LAST_RETRY_SECONDS, pause) * (0.5 + 0.5 * _jitter(key, entry.num_failures))
        pause = max(retry_after_seconds, pause)
        entry.not_before = now + pause
        self.wake(key, now, pause)
        return pause

    def next_due(self) -> float:
        """When a key is due that has no pass; infinite if none will be."""
        dues = (each.due for each in self._entries.values() if not each.is_running)
        return min(dues, default=math.inf)

    def overdue(self, now: float) -> list[float]:
        """By how many seconds each due key is late."""
        return [now - each.due for each in self._entries.values() if each.due <= now]

    def oldest_success_seconds(self, now: float) -> float:
        """Since the last pass that succeeded, of the key for which it is longest ago."""
        return now - min((each.since for each in self._entries.values()), default=now)


class WorkQueue:
    """Runs a pass for each key that is due. Asyncio loop."""

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        num_workers: int,
        now: Callable[[], float],
    ) -> None:
        """Make a queue that runs nothing yet.

        Args:
            work: one pass; returns the seconds after which the next one is due at the latest, None
                for a key that is gone.
            num_workers: passes at the same time.
            now: seconds, of a clock that never goes back.
        """
        self._pass_ids = itertools.count(1)
        self._work = work
        self._num_workers = num_workers
        self._now = now
        self._schedule = Schedule()
        self._tasks: set[asyncio.Task[float | None]] = set()
        self._changed = asyncio.Event()

    def wake(self, key: Key, *, is_changed: bool = False) -> None:
        """Something happened to a key, or the resource itself was changed: a pass is due soon."""
        (self._schedule.change if is_changed else self._schedule.wake)(key, self._now())
        self._changed.set()

    def longest_wait_seconds(self) -> float:
        """How late the latest key is; 0 if none is."""
        return max(self._schedule.overdue(self._now()), default=0.0)

    async def run(self) -> None:
        """Work until cancelled; then the running passes are cancelled, too."""
        try:
            while True:
                self._changed.clear()
                self._start_due()
                is_full = len(self._tasks) >= self._num_workers
                idle_seconds = math.inf if is_full else self._schedule.next_due() - self._now()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if idle_seconds == math.inf else idle_seconds):
                        await self._changed.wait()
        finally:
            tasks, self._tasks = self._tasks, set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start_due(self) -> None:
        now = self._now()
        while len(self._tasks) < self._num_workers and (key := self._schedule.take(now)):
            # All log lines of a pass carry these fields, the one about its end too.
            context = contextvars.copy_context()
            fields = {"namespace": key[0], "name": key[1], "pass_id": next(self._pass_ids)}
            context.run(bound_fields.set, fields)
            task = asyncio.get_running_loop().create_task(self._pass(key), context=context)
            self._tasks.add(task)
            task.add_done_callback(partial(self._end, key), context=context)
        overdue = self._schedule.overdue(now)
        metrics.QUEUE_DEPTH.set(len(overdue))
        metrics.OLDEST_UNRECONCILED_SECONDS.set(max(overdue, default=0.0))
        metrics.OLDEST_SUCCESS_SECONDS.set(self._schedule.oldest_success_seconds(now))

    async def _pass(self, key: Key) -> float | None:
        with metrics.RECONCILE_SECONDS.time():
            async with asyncio.timeout(PASS_SECONDS):
                return await self._work(key)

    def _end(self, key: Key, task: "asyncio.Task[float | None]") -> None:
        """A pass has ended. Whatever its error was, the key comes again, and no other key waits."""
        if task not in self._tasks:  # the queue has ended
            return
        self._tasks.remove(task)
        self._changed.set()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            again_after = task.result()
            metrics.RECONCILES_TOTAL.labels("gone" if again_after is None else "ok").inc()
            self._schedule.finish(key, self._now(), again_after)
            return
        metrics.ERRORS_TOTAL.labels(type(error).__name__).inc()
        retry_after_seconds = error.retry_after_seconds if isinstance(error, ClusterError) else 0.0
        pause = self._schedule.fail(key, self._now(), retry_after_seconds)
        if isinstance(error, ClusterError | TimeoutError):
            metrics.RECONCILES_TOTAL.labels("error").inc()
            message = str(error) or "too slow"
            _log.warning("pass_failed", error=message, retry_seconds=round(pause, 1))
        else:
            metrics.RECONCILES_TOTAL.labels("crash").inc()
            _log.error("pass_crashed", stack="".join(traceback.format_exception(error)))


def _jitter(key: Key, number: int) -> float:
    """A fraction, 0..1, that differs from key to key and from number to number."""
    return zlib.crc32(f"{key}/{number}".encode()) / 0xFFFFFFFF
