"""How long a round waits for columns of its tables, and a session for its first table. Pure.

A sequence whose proposal has D tokens is expected to gain E(D) = 1 + a + ... + a^D tokens in the
next round, with the acceptance a. Columns that arrive add G tokens to E, the sum over sequences.
Waiting for them pays while the tokens per second of a round with them are more than without:

    (E + G) / (seconds of waiting + T_proposed) > E / T

T is the duration of a round with these proposals: T_plain if there are none, else T_proposed.

A round waits for at most that time, and only if the frame is expected in it. The time of the first
frame varies more than the time between columns, so it must be expected in half of it: a wait
without a result costs what the results of others gain.

Source: speculation.md, sections 2 and 7.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf
from statistics import median

_WINDOW_ROUNDS = 16
_DECAY = 0.98
"""Weight of the tokens of earlier rounds in the acceptance, for each round that follows."""
_PRIOR_TESTED, _PRIOR_ACCEPTED = 10.0, 8.0
_MIN_ACCEPTANCE, _MAX_ACCEPTANCE = 0.05, 0.95
_WEIGHT = 0.25
"""Weight of the newest measurement in a mean."""
_SAFE_SHARE = 0.5
"""Share of the time that pays in which the first frame of a table must be expected."""
OPENING_SECONDS = 5.0
OPENING_SECONDS_PER_TOKEN = 0.005
"""Slower than any useful draft, also while it serves other sessions: it builds up to four batches
of tables between two chunks of a prompt."""


class ColumnTimes:
    """When the columns of a link's tables arrive.

    Guarded by the lock of ``DraftPool``.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Mean time between two columns of a table; 0 before the first measurement."""
        self.first_seconds = 0.0
        """Mean time from a commit to the first frame of its table; 0 before the first measurement.
        """
        self.first_depth = 1.0
        """Mean number of columns in that frame."""

    def note_first(self, depth: int, seconds: float) -> None:
        """Note the first frame of a table: its columns, and the time from the commit to it."""
        self.first_depth += _WEIGHT * (depth - self.first_depth)
        self.first_seconds += _WEIGHT * (seconds - self.first_seconds)

    def note_late(self, seconds: float) -> None:
        """Note that no column has arrived so long after the commit."""
        self.first_seconds = max(self.first_seconds, seconds)

    def note(self, seconds: float) -> None:
        """Note the time from one column to the next."""
        self.seconds += (_WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)


class RoundPace:
    """What a round yields: its duration without waiting, and the acceptance of proposed tokens.

    Step thread only.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_WINDOW_ROUNDS)
        self._proposed: deque[float] = deque(maxlen=_WINDOW_ROUNDS)
        self._num_tested = _PRIOR_TESTED
        self._num_accepted = _PRIOR_ACCEPTED

    def note_round(self, seconds: float, *, is_plain: bool) -> None:
        """Note the duration of a round, with proposals or without, and without its waiting."""
        (self._plain if is_plain else self._proposed).append(seconds)

    def note_outcomes(self, accepted: Collection[tuple[int, int]]) -> None:
        """Note the accepted and the proposed tokens of each sequence of a round."""
        tested = sum(num + (num < num_proposed) for num, num_proposed in accepted)
        if tested == 0:
            return
        self._num_tested = _DECAY * self._num_tested + tested
        self._num_accepted = _DECAY * self._num_accepted + sum(num for num, _ in accepted)

    @property
    def plain_seconds(self) -> float:
        """Median duration of recent rounds without proposals; infinite if there was no round."""
        return median(self._plain or self._proposed or (inf,))

    @property
    def proposed_seconds(self) -> float:
        """Median duration of recent rounds with proposals; infinite if there was no round."""
        return median(self._proposed or self._plain or (inf,))

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
    num_columns: float = 0.0
    """Columns that the next frame is expected to add; 0 if the sequence does not wait."""
    next_at: float = 0.0
    """Expected arrival of that frame."""


def wait_until(rows: Iterable[Row], pace: RoundPace, now: float) -> float:
    """Return the time until which a round waits for the next frame; not after ``now``: no wait.

    Args:
        rows: all sequences of the round.
        pace: of recent rounds.
        now: the current time.
    """
    a = pace.acceptance
    num_expected = 0.0
    is_plain = True
    gains: defaultdict[tuple[float, bool], float] = defaultdict(float)
    for row in rows:
        # Parts of a geometric series.
        num_expected += (1 - a ** (row.depth + 1)) / (1 - a)
        is_plain &= row.depth == 0
        if row.num_columns:
            gain = a ** (row.depth + 1) * (1 - a**row.num_columns) / (1 - a)
            gains[row.next_at, row.depth == 0] += gain
    without = pace.plain_seconds if is_plain else pace.proposed_seconds
    until = now
    for (next_at, is_first), gain in gains.items():
        if without == inf:
            return inf
        seconds = without * (num_expected + gain) / num_expected - pace.proposed_seconds
        if next_at - now <= (_SAFE_SHARE if is_first else 1.0) * seconds:
            until = max(until, now + seconds)
    return until


def opening_seconds(num_tokens: int) -> float:
    """Return the maximum time of an opening before which a draft prefills ``num_tokens``."""
    return OPENING_SECONDS + num_tokens * OPENING_SECONDS_PER_TOKEN
