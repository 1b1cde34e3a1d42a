"""When a target needs its next tables, predicted from its recent commits. Pure."""

from collections import deque
from collections.abc import Collection

_WINDOW_COMMITS = 8


class CommitForecast:
    """The intervals between the commits of one link. Step thread only.

    A verify of proposals takes longer than one without: each kind of round has its own intervals,
    and a round without proposals is expected to take no longer than the others.
    """

    def __init__(self) -> None:
        self._recent_seconds: dict[bool, deque[float]] = {
            is_plain: deque(maxlen=_WINDOW_COMMITS) for is_plain in (True, False)
        }
        self._arrived_at: float | None = None
        self._is_plain = True

    def add_commits(self, arrived_at: float, waited_seconds: float, *, is_plain: bool) -> None:
        """Add the arrival of commits.

        Args:
            arrived_at: time of the arrival.
            waited_seconds: how long the round before the commits waited for tables. Without the
                wait, the target would have sent the commits earlier.
            is_plain: whether the round after the commits has no proposals.
        """
        if self._arrived_at is not None:
            seconds = max(0.0, arrived_at - self._arrived_at - waited_seconds)
            self._recent_seconds[self._is_plain].append(seconds)
        self._arrived_at = arrived_at
        self._is_plain = is_plain

    @property
    def seconds(self) -> float:
        """Seconds from a commit to the next one, if no round waits; 0 if unknown.

        This is the lower quartile: a table that is sent too early costs a frame, one that is sent
        too late a round.
        """
        recent = self._recent_seconds
        plain, proposed = _lower_quartile(recent[True]), _lower_quartile(recent[False])
        if not plain or not proposed:
            return plain or proposed
        return min(plain, proposed) if self._is_plain else proposed


def _lower_quartile(seconds: Collection[float]) -> float:
    return sorted(seconds)[len(seconds) // 4] if seconds else 0.0
