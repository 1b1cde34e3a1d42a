"""How many branches the tables of a batch get. No clock, no I/O.

More branches foresee more outcomes, fewer branches take less time in each step. With N branches, a
table contains the outcome with probability p(N). With D columns, after the time t(N, D) since the
commit, it is expected to give the next rounds

    (1 + p(N) (a + a^2 + ... + a^D)) / max(T, t(N, D))

tokens per second, with the acceptance a of a token and the time T that the target takes without
waiting. The choice is the N that has the largest value for any D. A draft that has the time takes
the largest N.

Times are medians of a few measurements. While the draft is too slow for complete tables of all
branches, one table of ``TRY_TABLES`` has the number of branches that was measured longest ago.

*Decision*: the draft chooses, for each batch of tables. *Because*: it knows the probabilities of
the outcomes, the time of its steps and the time that is left. With 24 branches, which give the
embedded draft at most one column in time, the hit rate at temperature 1 was .02 and .68 in two
runs; with 12 branches .64 and .68, with 6 .64 and .65 (two CPUs, other work on the machine). *Not
chosen*: a number of branches from the target's controller, which sees none of these. *Revisit when*
the choice changes from table to table, since OpenVINO then prepares its nodes again.

Letters: B sessions, N branches.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

ACCEPTANCE = 0.8
"""Assumed for a token of a table, as on a target before it has measured."""
TRY_TABLES = 32
_FIRST_KEPT, _STEPS_KEPT = 7, 15
"""Newest measurements of which the median counts."""
_FIXED_SHARE = 0.5
"""Assumed share of the time of a step that does not depend on the branches. Used until measured."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since the commit that the tables answer."""

    round: float
    """Until the target needs them."""
    spent: float
    """Until now."""


class _Times:
    """Seconds of a table of one number of branches, by its parts."""

    def __init__(self) -> None:
        self.first: deque[float] = deque(maxlen=_FIRST_KEPT)
        """From the start to the first column or columns."""
        self.first_depth = 1
        """Columns that come first: all of them if they are one pass."""
        self.step: deque[float] = deque(maxlen=_STEPS_KEPT)
        """Of each column after it."""
        self.used_at = 0
        """Number of the newest table."""


class BranchChoice:
    """The times of tables by branches and sessions, and the choice from them. Step thread only."""

    def __init__(self, counts: Sequence[int], lookahead: int) -> None:
        """Construct; ``counts`` are the possible numbers of branches, ``lookahead`` is K."""
        self._counts = sorted(counts, reverse=True)
        self._lookahead = lookahead
        self._num_tables = 0
        self._times: defaultdict[int, dict[int, _Times]] = defaultdict(
            lambda: {each: _Times() for each in self._counts}
        )
        """By size class of the sessions, and by branches."""

    def note_first(self, num_sessions: int, branches: int, seconds: float, depth: int = 1) -> None:
        """Note the time from the start of a batch of tables to its first columns."""
        times = self._times[_size_class(num_sessions)][branches]
        times.first.append(seconds)
        times.first_depth = depth
        self._num_tables += 1
        times.used_at = self._num_tables

    def note_step(self, num_sessions: int, branches: int, seconds: float) -> None:
        """Note the time from one column to the next."""
        self._times[_size_class(num_sessions)][branches].step.append(seconds)

    def choose(
        self,
        num_sessions: int,
        timing: Timing | None,
        probability_BN: NDArray[np.float64] | None,
    ) -> int:
        """Return the number of branches of the tables that start now.

        Args:
            num_sessions: of the batch.
            timing: of the round; None is unknown.
            probability_BN: of the outcomes that were selected, in their order; None is unknown.
        """
        times, most = self._times[_size_class(num_sessions)], self._counts[0]
        if probability_BN is None or timing is None or not times[most].first:
            return most
        found_N = probability_BN.mean(axis=0).cumsum()

        def value(branches: int) -> float:
            found = float(found_N[branches - 1])
            return max(
                (1.0 + found * _tokens(depth)) / max(timing.round, timing.spent + seconds)
                for depth, seconds in self._columns(times, branches)
            )

        is_slow = timing.spent + max(self._columns(times, most))[1] > timing.round
        if is_slow and self._num_tables % TRY_TABLES == 0:
            return min(self._counts, key=lambda each: times[each].used_at)
        return max(self._counts, key=value)

    def _columns(self, times: Mapping[int, _Times], branches: int) -> list[tuple[int, float]]:
        """Return possible depths of a table, and the seconds from its start to each."""
        its = times[branches]
        share = 1.0
        if not its.first:
            its = times[self._counts[0]]
            share = _FIXED_SHARE + (1.0 - _FIXED_SHARE) * branches / self._counts[0]
        first, step = share * median(its.first), share * median(its.step or its.first)
        return [
            (depth, first + (depth - its.first_depth) * step)
            for depth in range(its.first_depth, self._lookahead + 1)
        ]


def _tokens(depth: int) -> float:
    return ACCEPTANCE * (1.0 - ACCEPTANCE**depth) / (1.0 - ACCEPTANCE)


def _size_class(num_sessions: int) -> int:
    return (num_sessions - 1).bit_length()
