"""Which resource has a pass when: debounced, one pass at a time, retried with back-off."""

import asyncio
import contextvars
import itertools
import math
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from ssd.observability.log import bound_fields, get_logger
from ssd_operator.observe.cluster import ClusterError, ForbiddenError, Key
from ssd_operator.policy.back_off import back_off_seconds, jitter
from ssd_operator.runtime import metrics

DEBOUNCE_SECONDS = 0.05
"""Events that come together are one pass."""
SETTLE_SECONDS = 1.0
"""Time without a further change of a resource before its next pass. Each pass may begin to replace
pods, so 21 edits in 5 s must not be 21 rollouts."""
LONGEST_SETTLE_SECONDS = 10.0
"""Maximum delay by changes that do not end."""
RESYNC_SECONDS = 30.0
"""Longest time between two passes, varied by ± 20 %."""
_RESYNC_SPREAD = 0.2
PARTIAL_SECONDS = 1.0
"""Shortest time from a partial pass to the next one, which reads missing objects and the resource
from the API server."""
PASS_SECONDS = 120.0
"""Longest pass; each of its calls has a shorter deadline of its own."""

_log = get_logger(__name__)


class PartialError(ForbiddenError):
    """Some calls of a pass were forbidden and are deferred; all others were made.

    Without an event, the next pass is due after ``retry_after_seconds``.
    """

    def __init__(
        self, message: str, retry_after_seconds: float = 0.0, *, can_write: bool = True
    ) -> None:
        """``can_write``: the cluster has an object that the operator wrote for the resource."""
        super().__init__(message, retry_after_seconds)
        self.can_write = can_write


@dataclass(slots=True)
class _Entry:
    """One resource. Times are seconds of the event loop's clock."""

    succeeded_at: float
    """End of the last pass that succeeded; before it, the first wake."""
    due: float = math.inf
    timer: asyncio.TimerHandle | None = None
    """Begins the next pass; None while one runs."""
    task: asyncio.Task[float | None] | None = None
    """The pass that runs or waits for a worker."""
    not_before: float = -math.inf
    """Time of a retry, when changes of the resource have settled, or a while after a partial
    pass."""
    changed_at: float = math.inf
    """First change of the resource after the begin of its last pass."""
    num_failures: int = 0


class WorkQueue:
    """Runs a pass for each resource that is due. Asyncio loop."""

    def __init__(self, work: Callable[[Key], Awaitable[float | None]], num_workers: int) -> None:
        """Run nothing before ``start``, then at most ``num_workers`` passes at the same time.

        ``work``, one pass, returns the seconds after which the next one is due at the latest, None
        for a resource that is gone.
        """
        self._work = work
        self._slots = asyncio.Semaphore(num_workers)
        self._started = asyncio.Event()
        self._is_closed = False
        self._now = asyncio.get_running_loop().time
        self._built_at = self._now()
        self._pass_ids = itertools.count(1)
        self._entries: dict[Key, _Entry] = {}
        metrics.QUEUE_DEPTH.set_function(lambda: len(self._overdue()))
        metrics.OLDEST_SUCCESS_SECONDS.set_function(self._oldest_success_seconds)

    def start(self) -> None:
        """Let passes begin."""
        self._started.set()

    def wake(self, key: Key, *, is_changed: bool = False) -> None:
        """Something happened to a resource: a pass is due soon, or at the retry of a failed one.

        After a change of the resource itself, which may correct what it failed for, a pass is due
        when the changes have settled. A closed queue ignores it.
        """
        if self._is_closed:
            return
        now = self._now()
        entry = self._entries.setdefault(key, _Entry(now))
        if is_changed:
            entry.num_failures, entry.due = 0, math.inf
            entry.changed_at = min(entry.changed_at, now)
            longest = entry.changed_at + LONGEST_SETTLE_SECONDS
            entry.not_before = min(now + SETTLE_SECONDS, longest)
        self._set_due(key, entry, now + DEBOUNCE_SECONDS)

    def longest_wait_seconds(self) -> float:
        """How late the latest resource is; 0 if none is."""
        return max(self._overdue(), default=0.0)

    async def close(self) -> None:
        """Cancel all passes, and begin no more. Idempotent."""
        self._is_closed = True
        entries, self._entries = self._entries.values(), {}
        for timer in [entry.timer for entry in entries if entry.timer is not None]:
            timer.cancel()
        tasks = [entry.task for entry in entries if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _overdue(self) -> list[float]:
        """By how many seconds each resource is late."""
        now = self._now() if self._started.is_set() else -math.inf
        return [now - entry.due for entry in list(self._entries.values()) if entry.due <= now]

    def _oldest_success_seconds(self) -> float:
        """Seconds since the last success, of the resource for which it is longest ago.

        Before the start, since the construction: no resource is known then.
        """
        now, entries = self._now(), list(self._entries.values())
        without_any = now if self._started.is_set() else self._built_at
        return now - min((entry.succeeded_at for entry in entries), default=without_any)

    def _set_due(self, key: Key, entry: _Entry, due: float) -> None:
        entry.due = min(entry.due, max(due, entry.not_before))
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.task is None:
            entry.timer = asyncio.get_running_loop().call_at(entry.due, self._begin, key, entry)

    def _begin(self, key: Key, entry: _Entry) -> None:
        # All log lines of a pass carry these fields, the one about its end too.
        context = contextvars.copy_context()
        fields = {"namespace": key[0], "name": key[1], "pass_id": next(self._pass_ids)}
        context.run(bound_fields.set, fields)
        loop = asyncio.get_running_loop()
        entry.timer, entry.task = None, loop.create_task(self._pass(key, entry), context=context)
        entry.task.add_done_callback(partial(self._end, key, entry), context=context)

    async def _pass(self, key: Key, entry: _Entry) -> float | None:
        await self._started.wait()
        async with self._slots:
            entry.due, entry.changed_at, entry.not_before = math.inf, math.inf, -math.inf
            with metrics.RECONCILE_SECONDS.time():
                async with asyncio.timeout(PASS_SECONDS):
                    return await self._work(key)

    def _end(self, key: Key, entry: _Entry, task: "asyncio.Task[float | None]") -> None:
        """Set when the next pass of a resource is due, whatever error has ended this one."""
        if self._entries.get(key) is not entry:  # the queue has ended
            return
        now, entry.task = self._now(), None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        resync = RESYNC_SECONDS * (1 + _RESYNC_SPREAD * (2 * jitter(key, int(now)) - 1))
        if error is not None:
            pause = self._count_failure(key, entry, error)
            entry.not_before = now + pause
            if isinstance(error, PartialError):
                entry.succeeded_at, entry.not_before = now, now + PARTIAL_SECONDS
                pause = min(pause, resync)
            entry.due = max(entry.due, entry.not_before)
            self._set_due(key, entry, now + pause)
            return
        again_after = task.result()
        metrics.RECONCILES_TOTAL.labels("gone" if again_after is None else "ok").inc()
        if again_after is None and entry.due == math.inf:
            del self._entries[key]
            return
        entry.succeeded_at, entry.num_failures = now, 0
        again_after = resync if again_after is None else min(again_after, resync)
        self._set_due(key, entry, now + max(again_after, DEBOUNCE_SECONDS))

    def _count_failure(self, key: Key, entry: _Entry, error: BaseException) -> float:
        """Count and log an error; returns the seconds until the retry."""
        entry.num_failures += 1
        pause = back_off_seconds(key, entry.num_failures)
        metrics.ERRORS_TOTAL.labels(type(error).__name__).inc()
        if isinstance(error, PartialError):
            entry.num_failures, pause = 0, PARTIAL_SECONDS
        if isinstance(error, ClusterError):
            pause = max(error.retry_after_seconds, pause)
        if isinstance(error, ClusterError | TimeoutError):
            metrics.RECONCILES_TOTAL.labels("error").inc()
            message = str(error) or "too slow"
            _log.warning("pass_failed", error=message, retry_seconds=round(pause, 1))
        else:
            metrics.RECONCILES_TOTAL.labels("crash").inc()
            _log.error("pass_crashed", stack="".join(traceback.format_exception(error)))
        return pause
