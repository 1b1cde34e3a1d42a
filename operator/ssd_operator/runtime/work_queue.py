"""Which resource is looked at when: debounced, one pass at a time, retried with patience.

``Schedule`` decides and is pure but for what it remembers; ``WorkQueue`` runs the passes.

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
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from ssd.telemetry import bound_fields, get_logger
from ssd_operator.observe.cluster import ClusterError
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
KeyT = TypeVar("KeyT", bound=Hashable)


class Schedule(Generic[KeyT]):
    """When which key is due. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._due: dict[KeyT, float] = {}
        self._running: set[KeyT] = set()
        self._num_failures: dict[KeyT, int] = {}
        self._not_before: dict[KeyT, float] = {}
        self._good_since: dict[KeyT, float] = {}
        self._changes: dict[KeyT, tuple[float, float]] = {}
        """Time of the first change that no pass has seen, and when the key has settled."""

    def wake(self, key: KeyT, now: float, after: float = DEBOUNCE_SECONDS) -> None:
        """Let a key be due soon; one that failed keeps waiting for its retry."""
        self._good_since.setdefault(key, now)
        _, settled_at = self._changes.get(key, (now, -math.inf))
        due = max(now + after, self._not_before.get(key, -math.inf), settled_at)
        self._due[key] = min(due, self._due.get(key, math.inf))

    def change(self, key: KeyT, now: float) -> None:
        """The resource itself was changed: a pass is due when the changes have settled.

        It does not wait for a retry: the change may correct what the key failed for.
        """
        self._num_failures.pop(key, None)
        self._not_before.pop(key, None)
        self._due.pop(key, None)
        first, _ = self._changes.get(key, (now, now))
        self._changes[key] = first, min(now + SETTLE_SECONDS, first + LONGEST_SETTLE_SECONDS)
        self.wake(key, now, 0.0)

    def take(self, now: float) -> KeyT | None:
        """The key that is due for longest and is not being worked on; None if there is none."""
        ready = [(due, key) for key, due in self._due.items() if self._may_run(key, now)]
        if not ready:
            return None
        _, key = min(ready, key=lambda entry: entry[0])
        del self._due[key]
        self._changes.pop(key, None)
        self._running.add(key)
        return key

    def finish(self, key: KeyT, now: float, again_after: float | None) -> None:
        """A pass has ended well; None for a key that is gone."""
        self._running.discard(key)
        self._num_failures.pop(key, None)
        self._not_before.pop(key, None)
        self._good_since.pop(key, None)
        if again_after is not None:
            resync = RESYNC_SECONDS * (1 + _RESYNC_SPREAD * (2 * _jitter(key, int(now)) - 1))
            self.wake(key, now, max(min(again_after, resync), DEBOUNCE_SECONDS))

    def fail(self, key: KeyT, now: float, retry_after_seconds: float = 0.0) -> float:
        """A pass has failed; returns the seconds until its retry."""
        self._running.discard(key)
        num_failures = self._num_failures.get(key, 0) + 1
        self._num_failures[key] = num_failures
        pause = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(num_failures - 1, 10))
        pause = max(retry_after_seconds, pause * (0.5 + 0.5 * _jitter(key, num_failures)))
        self._not_before[key] = now + pause
        self._due.pop(key, None)
        self.wake(key, now, pause)
        return pause

    def seconds_to_next(self, now: float) -> float | None:
        """Until some key is due that is not being worked on; None if none will be."""
        dues = [due for key, due in self._due.items() if key not in self._running]
        return max(0.0, min(dues) - now) if dues else None

    def overdue(self, now: float) -> list[float]:
        """By how many seconds each due key is late."""
        return [now - due for due in self._due.values() if due <= now]

    def oldest_success_seconds(self, now: float) -> float:
        """Since the last good pass, or the first wake, of the key for which it is longest ago."""
        return now - min(self._good_since.values(), default=now)

    def _may_run(self, key: KeyT, now: float) -> bool:
        return self._due[key] <= now and key not in self._running


class WorkQueue(Generic[KeyT]):
    """Runs a pass for each key that is due. Asyncio loop."""

    def __init__(
        self,
        work: Callable[[KeyT], Awaitable[float | None]],
        *,
        num_workers: int,
        now: Callable[[], float],
        fields: Callable[[KeyT], dict[str, object]] = lambda key: {"key": key},
    ) -> None:
        """Make a queue that runs nothing yet.

        Args:
            work: one pass; returns the seconds after which it wants to be called again at the
                latest, None for a key that is gone.
            num_workers: passes at the same time.
            now: seconds, of a clock that never goes back.
            fields: what all log lines of a pass, and of what it begins, carry beside ``pass_id``.
        """
        self._fields = fields
        self._pass_ids = itertools.count(1)
        self._work = work
        self._num_workers = num_workers
        self._now = now
        self._schedule: Schedule[KeyT] = Schedule()
        self._tasks: set[asyncio.Task[float | None]] = set()
        self._changed = asyncio.Event()

    def wake(self, key: KeyT, *, is_changed: bool = False) -> None:
        """Something happened to a key, or the resource itself was changed: a pass is due soon."""
        if is_changed:
            self._schedule.change(key, self._now())
        else:
            self._schedule.wake(key, self._now())
        self._changed.set()

    def longest_wait_seconds(self) -> float:
        """How late the latest key is; 0 if none is."""
        return max(self._schedule.overdue(self._now()), default=0.0)

    async def run(self) -> None:
        """Work until cancelled; then the passes under way are cancelled, too."""
        try:
            while True:
                self._changed.clear()
                self._start_due()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._idle_seconds()):
                        await self._changed.wait()
        finally:
            tasks, self._tasks = self._tasks, set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _idle_seconds(self) -> float | None:
        if len(self._tasks) >= self._num_workers:
            return None
        return self._schedule.seconds_to_next(self._now())

    def _start_due(self) -> None:
        now = self._now()
        while len(self._tasks) < self._num_workers:
            key = self._schedule.take(now)
            if key is None:
                break
            self._start(key)
        overdue = self._schedule.overdue(now)
        metrics.QUEUE_DEPTH.set(len(overdue))
        metrics.OLDEST_UNRECONCILED_SECONDS.set(max(overdue, default=0.0))
        metrics.OLDEST_SUCCESS_SECONDS.set(self._schedule.oldest_success_seconds(now))

    def _start(self, key: KeyT) -> None:
        # The pass and what is told of its end carry the same fields, whoever writes the line.
        context = contextvars.copy_context()
        context.run(bound_fields.set, {**self._fields(key), "pass_id": next(self._pass_ids)})
        task = asyncio.get_running_loop().create_task(self._pass(key), context=context)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, key), context=context)

    async def _pass(self, key: KeyT) -> float | None:
        with metrics.RECONCILE_SECONDS.time():
            async with asyncio.timeout(PASS_SECONDS):
                return await self._work(key)

    def _ended(self, key: KeyT, task: "asyncio.Task[float | None]") -> None:
        if task not in self._tasks:  # the queue has ended
            return
        self._tasks.remove(task)
        self._changed.set()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            again_after = task.result()
            metrics.RECONCILES_TOTAL.labels("gone" if again_after is None else "ok").inc()
            self._schedule.finish(key, self._now(), again_after)
        else:
            self._failed(key, error)

    def _failed(self, key: KeyT, error: BaseException) -> None:
        """One resource's trouble is never another's: whatever it was, this key comes again."""
        metrics.ERRORS_TOTAL.labels(type(error).__name__).inc()
        is_known = isinstance(error, ClusterError | TimeoutError)
        wish = error.retry_after_seconds if isinstance(error, ClusterError) else 0.0
        pause = self._schedule.fail(key, self._now(), wish)
        metrics.RECONCILES_TOTAL.labels("error" if is_known else "crash").inc()
        if is_known:
            _log.warning(
                "pass_failed",
                error=str(error) or "too slow",
                retry_seconds=round(pause, 1),
            )
        else:
            _log.error("pass_crashed", stack="".join(traceback.format_exception(error)))


def _jitter(key: object, number: int) -> float:
    """A fraction, 0..1, that differs from key to key and from number to number."""
    return zlib.crc32(f"{key}/{number}".encode()) / 0xFFFFFFFF
