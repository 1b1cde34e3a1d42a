"""How long a round waits for columns of its tables, and a session for its first table. Pure.

A proposal has D tokens of a table and then M tokens of the backup. With their acceptances a and b
(see ``ssd.speculation.sources``), it is expected to gain in the next round

    E(D, M) = 1 + a + ... + a^D + a^D (b + ... + b^M)

tokens. C columns that arrive add G = E(D + C, M - C) - E(D, M), or nothing. Without them, a round
yields E tokens in T, with the sums over all sequences. T is the duration of a round with these
proposals: T_plain if there are none, else T_proposed. The time of prompts that are stored between
two rounds is not a part of it. If a table has columns, the time that pays for more is

    G T / E - (T_proposed - T)

since a round with them then has as many tokens per second. The first columns of a table gain this
only with the hit rate p, but a hit gains more than one round. After it, the draft continues a
branch that it has run. Its tables then take T_branch, and following rounds wait only for what
exceeds T_proposed, until the next miss. The time that pays for first columns is

    p (G T / E - (T_proposed - T)) + p^2 / (1 - p) (G T / E - (max(T_proposed, T_branch) - T))

The acceptance of the draft and the hit rate are known from tables that were in time. If no round
waits, a draft whose first frames come after the verify would stay late for good, whatever its
tables would add by now. Every ``TRIAL_ROUNDS`` rounds, or twice that if the wait takes up to two
rounds, and so on, a round therefore waits for a first frame, see ``trial_until``.

A round waits for at most that time since it began to wait, or since the newest column, and only if
the frame is expected in it. The time of the first frame varies more than the time between columns,
so a first frame must be expected in half of it: a wait without a result costs what the results of
others gain.

Source: speculation.md, sections 2 and 7.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf
from statistics import median

from ssd.speculation.estimates import Acceptance
from ssd.speculation.sources import TRIAL_ROUNDS, Sources

_WINDOW_ROUNDS = 16
_PRIOR_HIT_RATE = 0.8
_WEIGHT = 0.25
"""Weight of the newest measurement in a mean."""
_MOST_UNMEASURED = 8
"""Rounds that wait although none has been measured. While each step stores prompts, none is."""
_SAFE_SHARE = 0.5
"""Share of the time that pays in which the first frame of a table must be expected."""
OPENING_SECONDS = 5.0
OPENING_SECONDS_PER_TOKEN = 0.005
"""Slower than any useful draft, also while it serves other sessions: it builds up to four batches
of tables between two chunks of a prompt."""


class FirstFrames:
    """When the first frames of tables arrive, after commits of one kind."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Mean time that a draft takes for a frame; 0 before the first measurement."""
        self.depth = 1.0
        """Mean number of columns in them."""

    def add_frame(self, depth: int, seconds: float) -> None:
        """Add a frame: its columns, and the time since its draft could begin with it."""
        self.depth += _WEIGHT * (depth - self.depth)
        self.seconds += (_WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)

    def add_late_frame(self, seconds: float) -> None:
        """Raise the mean to the time for which a frame has not arrived."""
        self.seconds = max(self.seconds, seconds)


class ColumnTimes:
    """When the columns of a link's tables arrive.

    Guarded by the lock of ``DraftPool``.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self.first = {is_branch: FirstFrames() for is_branch in (True, False)}
        """After commits whose next proposal is a branch, which the draft has run, or has other
        tokens, which it has not."""

    def expected_first(self, *, is_branch: bool) -> FirstFrames:
        """Return the times after commits of a kind, or of the other kind until some are known."""
        same_kind, other_kind = self.first[is_branch], self.first[not is_branch]
        return same_kind if same_kind.seconds else other_kind

    @property
    def seconds(self) -> float:
        """Expected time from one column of a table to the next."""
        first = self.expected_first(is_branch=True)
        return self._seconds or first.seconds / first.depth

    def add_column(self, seconds: float) -> None:
        """Add the time from one column to the next."""
        self._seconds += (_WEIGHT if self._seconds else 1.0) * (seconds - self._seconds)

    def add_late_column(self, seconds: float) -> None:
        """Raise the mean to the time for which no other column has arrived."""
        self._seconds = max(self.seconds, seconds)


class RoundPace:
    """What a round yields: its duration without waiting, and the acceptances of its sources.

    Step thread only.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_WINDOW_ROUNDS)
        self._proposed: deque[float] = deque(maxlen=_WINDOW_ROUNDS)
        self.sources = Sources()
        self.hits = Acceptance(_PRIOR_HIT_RATE)
        """Share of the tables with a column that contained the outcome."""
        self._num_unmeasured = 0
        """Rounds that waited before the first one was measured."""

    def add_round(self, seconds: float, *, is_plain: bool) -> None:
        """Add the duration of a round, with proposals or without: no waits, no prompts."""
        (self._plain if is_plain else self._proposed).append(seconds)

    def add_wait(self) -> None:
        """Add a round that has waited."""
        self._num_unmeasured += not (self._plain or self._proposed)

    @property
    def waits_unmeasured(self) -> bool:
        """Whether rounds still wait if none has been measured."""
        return self._num_unmeasured < _MOST_UNMEASURED

    @property
    def plain_seconds(self) -> float:
        """Median duration of recent rounds without proposals; infinite if there was no round."""
        return median(self._plain or self._proposed or (inf,))

    @property
    def proposed_seconds(self) -> float:
        """Median duration of recent rounds with proposals; infinite if there was no round."""
        return median(self._proposed or self._plain or (inf,))


@dataclass(frozen=True, slots=True)
class Prospect:
    """The proposal of a sequence if its round does not wait, and what a wait may add."""

    depth: int
    """Tokens of the proposal from a table."""
    num_backup: int = 0
    """Tokens of the proposal from the backup."""
    num_columns: float = 0.0
    """Columns that the next frame is expected to add; 0 if the sequence does not wait."""
    next_at: float = 0.0
    """Expected arrival of that frame."""
    newest_at: float = 0.0
    """Arrival of the newest column; 0 without one."""
    branch_seconds: float = 0.0
    """T_branch of the link of the sequence."""
    repeats: bool = False
    """Whether the text repeats itself."""


def wait_until(
    prospects: Iterable[Prospect], pace: RoundPace, begun_at: float, now: float
) -> float:
    """Return the time until which a round waits for the next frame; a past time is no wait.

    In the first rounds, while none has been measured, it is infinite if a sequence waits.
    ``begun_at`` is when the round began to wait.
    """
    num_expected = 0.0
    is_plain = True
    gains: defaultdict[tuple[float, float, bool, float], float] = defaultdict(float)
    for prospect in prospects:
        repeats = prospect.repeats and not pace.sources.is_trial
        expected = pace.sources.expected_tokens(
            prospect.depth, prospect.num_backup, repeats=repeats
        )
        num_expected += expected
        is_plain &= prospect.depth == prospect.num_backup == 0
        if prospect.num_columns:
            num_backup = max(0.0, prospect.num_backup - prospect.num_columns)
            depth = prospect.depth + prospect.num_columns
            with_wait = pace.sources.expected_tokens(depth, num_backup, repeats=repeats)
            waits_since = max(begun_at, prospect.newest_at)
            wait = waits_since, prospect.next_at, prospect.depth == 0, prospect.branch_seconds
            gains[wait] += max(0.0, with_wait - expected)
    proposed_seconds = pace.proposed_seconds
    without = pace.plain_seconds if is_plain else proposed_seconds
    until = now
    for (waits_since, next_at, is_first, branch_seconds), gain in gains.items():
        if without == inf:
            return inf if pace.waits_unmeasured else now
        seconds = without * (num_expected + gain) / num_expected - proposed_seconds
        if is_first:
            hit_rate = pace.hits.rate
            later = seconds - max(0.0, branch_seconds - proposed_seconds)
            seconds = hit_rate * seconds + hit_rate**2 / (1.0 - hit_rate) * max(0.0, later)
        if next_at - waits_since <= (_SAFE_SHARE if is_first else 1.0) * seconds:
            until = max(until, waits_since + seconds)
    return until


def trial_until(prospects: Iterable[Prospect], pace: RoundPace, begun_at: float) -> float:
    """Return the time until which a trial waits for first frames; ``begun_at`` is no trial.

    Called once in a round, when it could begin to wait: a frame for the round before makes the
    expected time earlier. Whole rounds are waited for.
    """
    if not 0.0 < pace.proposed_seconds < inf:
        return begun_at
    until = begun_at
    for prospect in prospects:
        if waits_for_first(prospect):
            num_rounds = max(1, ceil((prospect.next_at - begun_at) / pace.proposed_seconds))
            if pace.sources.num_rounds % (TRIAL_ROUNDS * num_rounds) == 0:
                seconds = num_rounds * pace.proposed_seconds / _SAFE_SHARE
                until = max(until, begun_at + seconds)
    return until


def waits_for_first(prospect: Prospect) -> bool:
    """Return whether a sequence has no column of its table, and a frame is expected."""
    return prospect.num_columns > 0 and prospect.depth == 0


def opening_seconds(num_tokens: int) -> float:
    """Return the maximum time of an opening before which a draft prefills ``num_tokens``."""
    return OPENING_SECONDS + num_tokens * OPENING_SECONDS_PER_TOKEN
