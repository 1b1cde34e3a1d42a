"""How long a round waits for columns of its tables, and a session for its first table. Pure.

A sequence whose proposal has D tokens is expected to gain E(D) = 1 + a + ... + a^D tokens in the
next round, with the acceptance a. One more column adds a^(D+1) tokens. Waiting for it pays while
it adds more tokens per second than the next round of all sequences:

    seconds of waiting < T_round * sum of a^(D+1) over the sequences that wait / sum of all E(D)

A sequence without a column waits for at most that long from the decision on. One with columns waits
only if the next column, expected after the mean time between two columns, arrives in that time.

Source: speculation.md, sections 2 and 7.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median

_WINDOW_ROUNDS = 16
_DECAY = 0.98
"""Weight of the tokens of earlier rounds in the acceptance, for each round that follows."""
_PRIOR_TESTED, _PRIOR_ACCEPTED = 10.0, 8.0
_MIN_ACCEPTANCE, _MAX_ACCEPTANCE = 0.05, 0.95
_WEIGHT = 0.25
"""Weight of the newest time between two columns in their mean."""
OPENING_SECONDS = 5.0
OPENING_SECONDS_PER_TOKEN = 0.005
"""Slower than any useful draft, also while it serves other sessions: it builds up to four batches
of tables between two chunks of a prompt."""


class ColumnTimes:
    """Mean time between two columns of a table that arrives in several frames.

    Guarded by the lock of ``DraftPool``.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """0 before the first measurement."""

    def note(self, seconds: float) -> None:
        """Note the time from one column to the next."""
        self.seconds += (_WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)


class RoundPace:
    """What a round yields: its duration without waiting, and the acceptance of proposed tokens.

    Step thread only.
    """

    def __init__(self) -> None:
        self._recent_seconds: deque[float] = deque(maxlen=_WINDOW_ROUNDS)
        self._num_tested = _PRIOR_TESTED
        self._num_accepted = _PRIOR_ACCEPTED

    def note_round(self, seconds: float) -> None:
        """Note the duration of a round without the time for which it waited."""
        self._recent_seconds.append(seconds)

    def note_outcomes(self, accepted: Collection[tuple[int, int]]) -> None:
        """Note the accepted and the proposed tokens of each sequence of a round."""
        tested = sum(num + (num < num_proposed) for num, num_proposed in accepted)
        if tested == 0:
            return
        self._num_tested = _DECAY * self._num_tested + tested
        self._num_accepted = _DECAY * self._num_accepted + sum(num for num, _ in accepted)

    @property
    def seconds(self) -> float:
        """Median duration of recent rounds; infinite before the first."""
        return median(self._recent_seconds) if self._recent_seconds else float("inf")

    @property
    def acceptance(self) -> float:
        """Probability that a proposed token is accepted if those before it are."""
        rate = self._num_accepted / self._num_tested
        return min(max(rate, _MIN_ACCEPTANCE), _MAX_ACCEPTANCE)


@dataclass(frozen=True, slots=True)
class Row:
    """The proposal that one sequence would have without waiting."""

    depth: int
    """Its tokens."""
    is_waiting: bool = False
    """Whether its table may still add a column."""
    next_at: float | None = None
    """Expected arrival of that column; None if unknown."""


def wait_until(rows: Iterable[Row], pace: RoundPace, begun_at: float, now: float) -> float:
    """Return the time until which a round waits for the next column; not after ``now``: no wait.

    Args:
        rows: all sequences of the round.
        pace: of recent rounds.
        begun_at: when the round began to wait.
        now: on the same clock.
    """
    acceptance = pace.acceptance
    num_expected = 0.0
    gains: defaultdict[float | None, float] = defaultdict(float)
    for row in rows:
        # E(D), a geometric series.
        num_expected += (1 - acceptance ** (row.depth + 1)) / (1 - acceptance)
        if row.is_waiting:
            gains[row.next_at] += acceptance ** (row.depth + 1)
    until = now
    for next_at, gain in gains.items():
        seconds = pace.seconds * gain / num_expected
        if next_at is None:
            until = max(until, begun_at + seconds)
        elif next_at - now <= seconds:
            until = max(until, now + seconds)
    return until


def opening_seconds(num_tokens: int) -> float:
    """Return the maximum time of an opening before which a draft prefills ``num_tokens``."""
    return OPENING_SECONDS + num_tokens * OPENING_SECONDS_PER_TOKEN
