"""How many branches the tables of a batch get. Pure.

More branches foresee more outcomes, fewer branches take less time in each step. With N branches, a
table contains the outcome with probability p(N) and has D(N) columns when the target needs it. Its
expected accepted tokens are

    p(N) (a + a^2 + ... + a^D(N))

with the acceptance a of a token. The choice is the N with most of them, among the counts that the
draft has warmed up. A draft that has the time takes the largest one.

Letters: B sessions, N branches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ACCEPTANCE = 0.8
"""Of a token of a table; the choice depends little on it."""
_WEIGHT = 0.125
"""Weight of the newest measurement in a mean."""
_FIXED_SHARE = 0.5
"""Share of the time of a step that does not depend on the branches, until it is measured."""


@dataclass(slots=True)
class TableTimes:
    """Mean seconds of a table by its parts."""

    first: float
    """From its begin to the first column."""
    step: float
    """Of each column after it."""

    def columns(self, seconds: float) -> float:
        """Return how many columns there are after some time, with fractions; 0 if none is."""
        if seconds < self.first:
            return 0.0
        return 1.0 + (seconds - self.first) / max(self.step, 1e-6)


class BranchChoice:
    """The times of tables by branches and sessions, and the choice from them. Step thread only."""

    def __init__(self, counts: Sequence[int], lookahead: int) -> None:
        """Construct; ``counts`` are the possible numbers of branches, ``lookahead`` is K."""
        self._counts = sorted(counts, reverse=True)
        self._lookahead = lookahead
        self._times: dict[tuple[int, int], TableTimes] = {}
        """By size class of the sessions and by branches."""

    def note_first(self, num_sessions: int, branches: int, seconds: float) -> None:
        """Note the time from the begin of a batch of tables to its first column."""
        key = _size_class(num_sessions), branches
        times = self._times.setdefault(key, TableTimes(seconds, seconds))
        times.first += _WEIGHT * (seconds - times.first)

    def note_step(self, num_sessions: int, branches: int, seconds: float) -> None:
        """Note the time of a later step."""
        times = self._times.get((_size_class(num_sessions), branches))
        if times is not None:
            times.step += _WEIGHT * (seconds - times.step)

    def choose(
        self, num_sessions: int, seconds: float, probability_BN: NDArray[np.float64] | None
    ) -> int:
        """Return the number of branches of the tables that begin now.

        Args:
            num_sessions: of the batch.
            seconds: until the target needs the tables; 0 is unknown.
            probability_BN: of the outcomes that were selected, in their order; None is unknown.
        """
        most = self._counts[0]
        known = self._times.get((_size_class(num_sessions), most))
        if probability_BN is None or seconds <= 0 or known is None:
            return most
        found_N = probability_BN.mean(axis=0).cumsum()
        return max(self._counts, key=lambda each: self._value(num_sessions, each, seconds, found_N))

    def _value(
        self, num_sessions: int, branches: int, seconds: float, found_N: NDArray[np.float64]
    ) -> tuple[float, float]:
        """Return the expected tokens of a table, and how early its first column arrives."""
        times = self._expected(num_sessions, branches)
        depth = min(max(times.columns(seconds), 0.0), self._lookahead)
        tokens = ACCEPTANCE * (1.0 - ACCEPTANCE**depth) / (1.0 - ACCEPTANCE)
        return float(found_N[branches - 1]) * tokens, -times.first

    def _expected(self, num_sessions: int, branches: int) -> TableTimes:
        key, most = _size_class(num_sessions), self._counts[0]
        if (key, branches) in self._times:
            return self._times[key, branches]
        known = self._times[key, most]
        share = _FIXED_SHARE + (1.0 - _FIXED_SHARE) * branches / most
        return TableTimes(known.first * share, known.step * share)


def _size_class(num_sessions: int) -> int:
    return (num_sessions - 1).bit_length()
