"""How many sessions a draft can serve in time, from how long its tables take. Pure.

A table hides behind the verify that follows the commit it answers, so a draft is full when the
tables of one session more would take longer than that. A draft answers all sessions of a link in
one batch, whose time grows by less than a session's share: what is known of small batches
understates the capacity, and what is known of batches that were too slow overstates it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows

_WEIGHT = 0.125
"""Of the newest batch, in the mean of those of its size."""
_SHORTEST_SECONDS = 1e-6


class TablePace:
    """Seconds from a commit to the last table of its batch, by the sessions in the batch.

    The step thread notes, any thread may read. As many entries as a draft keeps sessions.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def note(self, seconds: Rows[float]) -> None:
        """The tables of a round took this long, or longer where they have not come."""
        count, slowest = len(seconds), max(seconds)
        mean = self._seconds.get(count, slowest)
        self._seconds[count] = mean + _WEIGHT * (slowest - mean)

    @property
    def seconds_by_sessions(self) -> dict[int, float]:
        """Mean seconds of recent batches, by the sessions in them."""
        return self._seconds.copy()


def draft_capacity(
    seconds_by_sessions: Mapping[int, float], verify_seconds: float, max_sessions: int
) -> int:
    """Sessions whose tables a draft finishes within one verify.

    T_verify over the seconds that a session costs in the best batch that was in time, or in the
    smallest batch if none was.

    Args:
        seconds_by_sessions: seconds of a batch of tables, by the sessions in it.
        verify_seconds: T_verify, of one forward pass of the target.
        max_sessions: what the draft keeps at most, >= 1.

    Returns:
        1..max_sessions; max_sessions while one of the times is not known.
    """
    if not seconds_by_sessions or verify_seconds <= 0:
        return max_sessions
    batches = sorted(seconds_by_sessions.items())
    in_time = [batch for batch in batches if batch[1] <= verify_seconds] or batches[:1]
    cost = min(max(seconds, _SHORTEST_SECONDS) / count for count, seconds in in_time)
    return max(1, min(max_sessions, int(verify_seconds / cost)))
