"""The mean over the last half minute of a number that changes in steps."""

import threading
from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 30.0
_INTERVAL_SECONDS = 1.0


@dataclass(slots=True)
class _Interval:
    """A span of time and the integral of the number over it."""

    begin: float
    end: float
    area: float


class TimeMean:
    """Mean over the last ``WINDOW_SECONDS`` of a number that changes in steps. Any thread.

    Changes within a second share one interval, so the memory is bounded at any rate of changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: deque[_Interval] = deque()
        self._value = 0.0
        self._since: float | None = None

    def note(self, value: float, now: float) -> None:
        """Set the number to ``value`` from ``now`` on."""
        with self._lock:
            if self._since is not None:
                self._add(self._since, now)
            self._value = value
            self._since = now
            while self._intervals and self._intervals[0].end <= now - WINDOW_SECONDS:
                self._intervals.popleft()

    def mean(self, now: float) -> float:
        """Return the mean over the known part of the window; 0 before the first ``note``."""
        with self._lock:
            if self._since is None:
                return 0.0
            newest = _Interval(self._since, now, self._value * (now - self._since))
            oldest = now - WINDOW_SECONDS
            seconds = area = 0.0
            for interval in (*self._intervals, newest):
                length = interval.end - interval.begin
                inside = interval.end - max(interval.begin, oldest)
                if length > 0 and inside > 0:
                    seconds += inside
                    area += interval.area * inside / length
            return area / seconds if seconds > 0 else self._value

    def _add(self, begin: float, end: float) -> None:
        area = self._value * (end - begin)
        newest = self._intervals[-1] if self._intervals else None
        if newest is not None and end - newest.begin <= _INTERVAL_SECONDS:
            newest.end = end
            newest.area += area
        elif end > begin:
            self._intervals.append(_Interval(begin, end, area))
