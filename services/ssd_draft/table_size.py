"""How many branches and columns the tables of a batch get. No clock, no I/O.

More branches foresee more outcomes, more columns give longer proposals, and both take time. With N
branches, a table contains the outcome with probability p(N). With D columns, after the time t(N, D)
since the commit, it is expected to give the next rounds

    (1 + p(N) (a + a^2 + ... + a^D)) / max(T, t(N, D))

tokens per second, with the acceptance a of a token and the time T that the target takes without
waiting. The choice has the largest value. A draft that has the time takes the largest size.

Columns that are sent one by one cost only the time until they arrive: then a size counts with its
best D. A whole table of one session is one pass, so its length is a part of the choice.

Times are medians of a few measurements. While the draft is too slow for tables of the largest size,
one table of ``TRY_TABLES`` has the size that was measured longest ago.

*Decision*: the draft chooses, for each batch of tables. *Because*: it knows the probabilities of
the outcomes, the time of its steps and the time that is left. With 24 branches, which give the
embedded draft at most one column in time, the hit rate at temperature 1 was .02 and .68 in two
runs; with 12 branches .64 and .68, with 6 .64 and .65 (two CPUs, other work on the machine). *Not
chosen*: a number of branches from the target's controller, which sees none of these; branches with
fewer columns the less likely they are, which gain .04 tokens a round in the same time. *Revisit
when* the choice changes from table to table, since OpenVINO then prepares its nodes again.

Letters: B sessions, N branches.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssd.speculation.estimates import size_class

TRY_TABLES = 32
_FIRST_KEPT, _STEPS_KEPT = 7, 15
"""Number of newest measurements in a median."""
_FIXED_SHARE = 0.5
"""Assumed share of the time of a step that does not depend on the branches. Used until measured."""


class Size(NamedTuple):
    """The size of the tables of a batch."""

    branches: int
    length: int
    """Columns."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a target uses of the tables that begin."""

    round_seconds: float
    """Seconds between the commit that the tables answer and the lookup in the tables."""
    spent_seconds: float
    """Seconds since that commit."""
    acceptances: tuple[float, ...]
    """For each text, the probability that a token of a table is accepted if the tokens before it
    are."""
    length: int
    """Largest number of tokens of the target's next proposal."""


class _Median:
    """The median of the newest values, computed when a value is added."""

    def __init__(self, num_kept: int) -> None:
        self._values: deque[float] = deque(maxlen=num_kept)
        self.value = 0.0
        """0 without a value."""

    def add(self, value: float) -> None:
        self._values.append(value)
        self.value = median(self._values)


@dataclass(slots=True)
class _Times:
    """Seconds of the parts of tables of one size."""

    first: _Median = field(default_factory=lambda: _Median(_FIRST_KEPT))
    """From the start to the first column or columns."""
    first_depth: int = 1
    """Columns that come first: all columns if one pass runs them."""
    step: _Median = field(default_factory=lambda: _Median(_STEPS_KEPT))
    """From one column to the next."""
    used_at: int = 0
    """Number of the newest batch of tables of this size."""


class SizeChoice:
    """The times of tables by their size and sessions, and the choice from them. One thread."""

    def __init__(self, branch_counts: Sequence[int], *, is_adaptive: bool = True) -> None:
        """Construct; unless ``is_adaptive``, every table has the largest size."""
        self._is_adaptive = is_adaptive
        self._counts = sorted(branch_counts, reverse=True)
        self._num_tables = 0
        self._times: defaultdict[tuple[int, Size], _Times] = defaultdict(_Times)
        """Times by size class of the sessions and size of the tables."""

    def add_first(self, num_sessions: int, size: Size, seconds: float, depth: int = 1) -> None:
        """Add the time from the start of a batch of tables to its first columns."""
        times = self._times[size_class(num_sessions), size]
        times.first.add(seconds)
        times.first_depth = depth
        self._num_tables += 1
        times.used_at = self._num_tables

    def add_step(self, num_sessions: int, size: Size, seconds: float) -> None:
        """Add the time from one column to the next, if the first column was measured."""
        key = size_class(num_sessions), size
        if key in self._times:
            self._times[key].step.add(seconds)

    def choose(
        self,
        num_sessions: int,
        lengths: Sequence[int],
        need: Need | None,
        probability_BN: NDArray[np.float64] | None,
    ) -> Size:
        """Return the size of the tables that start now, with one of these numbers of columns.

        ``need`` is None if unknown, as is the probability of each selected outcome, in order.
        """
        group = size_class(num_sessions)
        most = Size(self._counts[0], max(lengths))
        measured = [size for measured_group, size in self._times if measured_group == group]
        if not (self._is_adaptive and need and measured) or probability_BN is None:
            return most
        reference = max(measured)
        hit_rate_N = probability_BN.mean(axis=0).cumsum()

        # Texts with the acceptances .95 and .05 gain more from long tables than two with .5.
        tokens = [
            fmean(_tokens(min(depth, need.length), acceptance) for acceptance in need.acceptances)
            for depth in range(most.length + 1)
        ]

        round_seconds, spent_seconds = need.round_seconds, need.spent_seconds

        def tokens_per_second(size: Size) -> float:
            hit_rate = float(hit_rate_N[size.branches - 1])
            return max(
                (1.0 + hit_rate * tokens[depth]) / max(round_seconds, spent_seconds + seconds)
                for depth, seconds in self._columns(group, size, reference)
            )

        longest_first = sorted(lengths, reverse=True)
        sizes = [Size(branches, length) for branches in self._counts for length in longest_first]
        is_slow = spent_seconds + max(self._columns(group, most, reference))[1] > round_seconds
        if is_slow and self._num_tables % TRY_TABLES == 0:
            return min(sizes, key=lambda size: self._used_at(group, size))
        return max(sizes, key=tokens_per_second)

    def _used_at(self, group: int, size: Size) -> int:
        return self._times[group, size].used_at if (group, size) in self._times else 0

    def _columns(self, group: int, size: Size, reference: Size) -> list[tuple[int, float]]:
        """Return possible depths of a table, and the seconds from its start to each.

        The times of a size that was not measured follow from the reference.
        """
        is_measured = (group, size) in self._times
        times = self._times[group, size if is_measured else reference]
        share, first_depth = 1.0, times.first_depth
        if not is_measured:
            share = _FIXED_SHARE + (1.0 - _FIXED_SHARE) * size.branches / reference.branches
            if times.first_depth == reference.length > 1:
                # One pass runs all columns. A single column may also be the column of a step.
                first_depth = size.length
            share *= (first_depth + 1) / (times.first_depth + 1)
        first = share * times.first.value
        step = share * (times.step.value or times.first.value)
        return [
            (depth, first + (depth - first_depth) * step)
            for depth in range(first_depth, size.length + 1)
        ]


def _tokens(depth: int, acceptance: float) -> float:
    return acceptance * (1.0 - acceptance**depth) / (1.0 - acceptance)
