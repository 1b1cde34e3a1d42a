"""When a target needs its next tables, predicted from its recent commits. Pure."""

from collections import deque

_WINDOW_COMMITS = 8


class CommitForecast:
    """The intervals between the commits of one link. Step thread only."""

    def __init__(self) -> None:
        self._recent_seconds: deque[float] = deque(maxlen=_WINDOW_COMMITS)
        self._arrived_at: float | None = None

    def note(self, arrived_at: float, waited_seconds: float) -> None:
        """Note the arrival of commits, and how long their round waited for tables.

        Without that wait, the target would have sent them earlier.
        """
        if self._arrived_at is not None:
            self._recent_seconds.append(max(0.0, arrived_at - self._arrived_at - waited_seconds))
        self._arrived_at = arrived_at

    @property
    def seconds(self) -> float:
        """Seconds from a commit to the next one, if no round waits; 0 if unknown.

        This is the lower quartile: a table that is sent too early costs a frame, one that is sent
        too late a round.
        """
        if not self._recent_seconds:
            return 0.0
        return sorted(self._recent_seconds)[len(self._recent_seconds) // 4]
