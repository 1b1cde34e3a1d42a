"""How long a refused client waits before it sends its request again."""

import contextlib
from collections import deque
from collections.abc import Iterator

from ssd.ports import Clock

_NUM_ENDS = 32
"""Ended sequences from which the rate is measured."""
_DEFAULT_SECONDS = 1.0
"""Hint before the rate is known."""
MIN_SECONDS, MAX_SECONDS = 0.1, 60.0
_FIRST_SHARE = 0.25
_GOLDEN = 0.6180339887498949


class RetryHint:
    """Estimates when a request that is refused now can be accepted. Asyncio loop.

    A hint is a quarter to all of the time in which the waiting sequences begin. Hints of successive
    refusals are spread evenly over it: clients that return together would be refused together, and
    the queue would be empty in between.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended_at: deque[float] = deque(maxlen=_NUM_ENDS)
        self._num_refused = 0
        self._num_requests = 0
        self._idle_since = clock.now()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request. Time without requests is no part of the rate."""
        if not self._num_requests:
            idle_seconds = self._clock.now() - self._idle_since
            self._ended_at = deque((at + idle_seconds for at in self._ended_at), _NUM_ENDS)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._idle_since = self._clock.now()

    def add_end(self) -> None:
        """Add a sequence that has ended, which makes room for another one."""
        self._ended_at.append(self._clock.now())

    def seconds(self, num_waiting: int) -> float:
        """Return the hint of a refusal, in seconds, while ``num_waiting`` sequences wait."""
        self._num_refused += 1
        if len(self._ended_at) < 2:
            return _DEFAULT_SECONDS
        seconds_per_end = (self._clock.now() - self._ended_at[0]) / len(self._ended_at)
        spread = self._num_refused * _GOLDEN % 1.0
        share = _FIRST_SHARE + (1 - _FIRST_SHARE) * spread
        return min(max(MIN_SECONDS, max(1, num_waiting) * seconds_per_end * share), MAX_SECONDS)
