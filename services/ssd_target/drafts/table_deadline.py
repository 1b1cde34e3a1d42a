"""How long a round waits for columns of its tables, and a session for its first table. Pure.

A proposal has D tokens of a table and then M tokens of the backup. With the acceptances a and b, it
is expected to gain in the next round

    E(D, M) = 1 + a + ... + a^D + a^D (b + ... + b^M)

tokens. C columns that arrive add G = E(D + C, M - C) - E(D, M). Waiting for them pays while the
tokens per second of a round with them are more than without, with the sums over all sequences:

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
_PRIOR_TESTED = 10.0
_PRIOR_FROM_TABLES, _PRIOR_FROM_BACKUP = 0.8, 0.5
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


class Acceptance:
    """Probability that a proposed token is accepted if those before it are. Step thread only."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._num_tested = _PRIOR_TESTED
        self._num_accepted = _PRIOR_TESTED * prior

    def note(self, num_tested: int, num_accepted: int) -> None:
        """Note the tokens of a round."""
        if num_tested:
            self._num_tested = _DECAY * self._num_tested + num_tested
            self._num_accepted = _DECAY * self._num_accepted + num_accepted

    def fade(self) -> None:
        """Approach the value before the first measurement, in a round that tests no token."""
        expected = self._num_tested * self._prior
        self._num_accepted = _DECAY * self._num_accepted + (1 - _DECAY) * expected

    @property
    def rate(self) -> float:
        """The estimate."""
        return min(max(self._num_accepted / self._num_tested, _MIN_ACCEPTANCE), _MAX_ACCEPTANCE)


@dataclass(frozen=True, slots=True)
class ProposalResult:
    """The tokens of one proposal in one round."""

    num_proposed: int
    num_from_table: int
    num_accepted: int

    @property
    def is_rejected(self) -> bool:
        """Whether a token was rejected; those after it are not tested."""
        return self.num_accepted < self.num_proposed


class RoundPace:
    """What a round yields: its duration without waiting, and the acceptance of proposed tokens.

    Step thread only.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_WINDOW_ROUNDS)
        self._proposed: deque[float] = deque(maxlen=_WINDOW_ROUNDS)
        self.from_tables = Acceptance(_PRIOR_FROM_TABLES)
        self.from_backup = Acceptance(_PRIOR_FROM_BACKUP)

    def note_round(self, seconds: float, *, is_plain: bool) -> None:
        """Note the duration of a round, with proposals or without, and without its waiting."""
        (self._plain if is_plain else self._proposed).append(seconds)

    def note_outcomes(self, proposals: Collection[ProposalResult]) -> None:
        """Note the proposals of a round."""
        tested = [(each, each.num_accepted + each.is_rejected) for each in proposals]
        num_of_tables = sum(min(num, each.num_from_table) for each, num in tested)
        num_of_backup = sum(max(0, num - each.num_from_table) for each, num in tested)
        self.from_tables.note(
            num_of_tables, sum(min(each.num_accepted, each.num_from_table) for each, _ in tested)
        )
        self.from_backup.note(
            num_of_backup,
            sum(max(0, each.num_accepted - each.num_from_table) for each, _ in tested),
        )
        if num_of_tables and not num_of_backup:
            # Otherwise, a backup that continues no proposal would never be tried again.
            self.from_backup.fade()

    def expected_tokens(self, depth: float, num_backup: float) -> float:
        """Return E(D, M)."""
        a, b = self.from_tables.rate, self.from_backup.rate
        after: float = a**depth * b * (1 - b**num_backup) / (1 - b)
        return float((1 - a ** (depth + 1)) / (1 - a)) + after

    @property
    def plain_seconds(self) -> float:
        """Median duration of recent rounds without proposals; infinite if there was no round."""
        return median(self._plain or self._proposed or (inf,))

    @property
    def proposed_seconds(self) -> float:
        """Median duration of recent rounds with proposals; infinite if there was no round."""
        return median(self._proposed or self._plain or (inf,))


@dataclass(frozen=True, slots=True)
class Row:
    """The proposal that one sequence would have without waiting."""

    depth: int
    """Its tokens of a table."""
    num_backup: int = 0
    """Its tokens of the backup."""
    num_columns: float = 0.0
    """Columns that the next frame is expected to add; 0 if the sequence does not wait."""
    next_at: float = 0.0
    """Expected arrival of that frame."""


def wait_until(rows: Iterable[Row], pace: RoundPace, now: float) -> float:
    """Return the time until which a round waits for the next frame; not after ``now``: no wait.

    Before the first round has been measured, it is infinite if a sequence waits.

    Args:
        rows: all sequences of the round.
        pace: of recent rounds.
        now: the current time.
    """
    num_expected = 0.0
    is_plain = True
    gains: defaultdict[tuple[float, bool], float] = defaultdict(float)
    for row in rows:
        expected = pace.expected_tokens(row.depth, row.num_backup)
        num_expected += expected
        is_plain &= row.depth == row.num_backup == 0
        if row.num_columns:
            num_backup = max(0.0, row.num_backup - row.num_columns)
            with_columns = pace.expected_tokens(row.depth + row.num_columns, num_backup)
            gains[row.next_at, row.depth == 0] += with_columns - expected
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
