"""The mean over the last half minute of a number that changes in steps."""

import threading
from collections import deque

import numpy as np

WINDOW_SECONDS = 30.0
_INTERVAL_SECONDS = 1.0


class TimeMean:
    """Mean over the last ``WINDOW_SECONDS`` of a number that changes in steps. Any thread.

    It keeps points of the integral of the number. Changes within a second share one point, so the
    memory is bounded at any rate of changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: deque[tuple[float, float]] = deque()
        """Times, and the integral up to them."""
        self._value = 0.0

    def set(self, value: float, now: float) -> None:
        """Set the number to ``value`` from ``now`` on."""
        with self._lock:
            points = self._points
            point = self._point(now)
            if len(points) > 1 and now - points[-2][0] <= _INTERVAL_SECONDS:
                points.pop()
            points.append(point)
            while len(points) > 1 and points[1][0] <= now - WINDOW_SECONDS:
                points.popleft()
            self._value = value

    def mean(self, now: float) -> float:
        """Return the mean over the known part of the window; 0 before the first ``set``."""
        with self._lock:
            if not self._points:
                return 0.0
            times, areas = zip(*self._points, self._point(now), strict=True)
            begin = max(times[0], now - WINDOW_SECONDS)
            if now <= begin:
                return self._value
            before = float(np.interp(begin, times, areas))
            mean: float = (areas[-1] - before) / (now - begin)
            return mean

    def _point(self, now: float) -> tuple[float, float]:
        if not self._points:
            return now, 0.0
        time, area = self._points[-1]
        return now, area + self._value * (now - time)
