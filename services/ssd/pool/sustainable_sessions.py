"""How many sessions a draft can serve in time, computed from the times of its tables. Pure.

The tables that follow a commit are built during the next verify. A draft is full if one more
session would make its tables take longer than the next verify. A draft builds the tables of all
sessions of a link in one batch, whose time grows by less than one session's share. Small batches
therefore underestimate the result, and batches that take longer overestimate it. A draft without
the time for all branches and columns gives its tables fewer, which raises the result.

The status reports the number for T_verify: it decides how many drafts are wanted. It is the larger
one of two. The time until the tables arrive contains turns of the draft for other targets, so on a
shared draft it underestimates the number. The work that the draft reports contains everything that
the draft does for the batch, also after its tables are sent. A draft of an earlier version does not
report it. Moves of sessions use the time until the tables arrive, and the time of a round without
its wait, which is when the tables are needed.

*Decision*: neither number limits the sessions of a draft: beyond it, proposals become shorter.
*Because*: with 16 sequences on 1 + 1 cores, the embedded pair decoded 674, 770 and 883 tokens/s
with 4, 8 and 16 sessions, 514 in plain decoding; its draft sustained 1. *Not chosen*: a limit from
trials, which kept 4 sessions where every table was late, and was 6 % slower than plain decoding.
*Revisit when* a draft on a GPU has columns in time for some of its sessions, but not for all.

*Decision*: a draft reports its work, by the size of the batch. *Because*: in a simulation, targets
that shared drafts for 20 sessions each ordered up to 12 drafts where 2 suffice, by the time until
the tables arrive, and 2 by the work. *Not chosen*: the minimum or a quartile of recent times, which
depend on how the commits of the targets fall; and one share of the link's turns, by which a target
multiplies its times, which ordered 5. A draft that is late because of other targets builds tables
with fewer branches and columns, and reports the work for these: the number then is larger than that
for full tables. *Revisit when* a GPU runs the steps of several links at once.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows

_WEIGHT = 0.125
"""Weight of the newest batch in the mean of its size."""
_MIN_SECONDS = 1e-6
_FEW = 8
"""Batches of a size after which it counts beside others."""
_RECENT_BATCHES = 512
"""Batches after which a smaller size that has not occurred is forgotten. A larger one may be the
reason for which another draft was ordered: without it, that draft would be removed again."""


class BatchTimes:
    """Seconds of batches of tables, by the number of sessions in the batch.

    A target measures from a commit to the last table, a draft its work. The step thread writes, any
    thread may read. It has an entry for each batch size that occurred, see ``_RECENT_BATCHES``.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._newest: dict[int, int] = {}
        """Number of the newest batch of each size."""
        self._counts: dict[int, int] = {}
        self._num_batches = 0

    def add_batch(self, seconds: Rows[float]) -> None:
        """Add the times of one batch; a table that has not arrived counts with its time so far."""
        count, slowest = len(seconds), max(seconds)
        self._num_batches += 1
        oldest = self._num_batches - _RECENT_BATCHES
        smaller = [size for size in self._newest if size < count and self._newest[size] < oldest]
        for size in smaller:
            del self._seconds[size], self._newest[size], self._counts[size]
        mean = self._seconds.get(count, slowest)
        self._seconds[count] = mean + _WEIGHT * (slowest - mean)
        self._newest[count] = self._num_batches
        self._counts[count] = self._counts.get(count, 0) + 1

    @property
    def seconds_by_sessions(self) -> dict[int, float]:
        """Mean seconds of recent batches, by the number of sessions in them.

        Sizes that have occurred fewer than ``_FEW`` times count only while all have: a pause of the
        machine may have been in them.
        """
        seconds, counts = self._seconds.copy(), self._counts.copy()
        usual = {size: time for size, time in seconds.items() if counts.get(size, 0) >= _FEW}
        return usual or seconds


def sustainable_sessions(
    seconds_by_sessions: Mapping[int, float], available_seconds: float, max_sessions: int
) -> int:
    """Return the number of sessions whose tables a draft completes in the available time.

    This is that time divided by the time per session of the best batch that was in time, or of the
    smallest batch if none was. It is less than the size of each larger batch that was late.

    Args:
        seconds_by_sessions: seconds of a batch of tables, by the number of sessions in it.
        available_seconds: time that the tables have.
        max_sessions: sessions that the draft accepts, >= 1.

    Returns:
        1..max_sessions; max_sessions while one of the times is unknown.
    """
    if not seconds_by_sessions or available_seconds <= 0:
        return max_sessions
    batches = sorted(seconds_by_sessions.items())
    in_time = [batch for batch in batches if batch[1] <= available_seconds] or batches[:1]
    seconds = min(max(batch_seconds, _MIN_SECONDS) / count for count, batch_seconds in in_time)
    late = [count for count, _ in batches if count > in_time[-1][0]]
    most = min([max_sessions, *(count - 1 for count in late)])
    return max(1, int(min(most, available_seconds / seconds)))
