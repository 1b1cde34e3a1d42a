"""Chooses the largest length of proposals, for the controller. No clock, no I/O.

It is the length with most tokens per second, from the acceptance at each position and the time of a
verify by columns. Each power of two of running sequences has its own estimates and its own length,
which apply as soon as so many sequences run.

With a calibration, the length is chosen from the first round on, with ``USUAL_ACCEPTANCE`` or the
acceptance at the nearest number of sequences that has rounds. Without one, it is K until plain
decoding is measured, and times are interpolated between plain decoding and the measured columns.
Waits for tables are measured by length, see ``_wait``.

*Decision*: a verify takes its calibrated time and the time that other verifies took beyond theirs.
*Because*: most of the difference is fixed: caches that the host has used, a new shape. It was 1.5
for four columns and .9 for seven (8 sequences, bfloat16), so proposals stayed short. *Not chosen*:
a factor and a constant, which two measured numbers of columns do not separate. *Revisit when* a
machine is slower than at its start by a factor.

*Decision*: the acceptance starts with a value that does not depend on the pair. *Because*: a text
of 64 tokens has 20 to 30 rounds: eight such texts of vLLM at T = 1 (float32, no AMX) had 1.1 times
the tokens per second of full proposals at first. *Not chosen*: the acceptance at the last measured
position for all positions beyond: it contains the misses if that is the first one, so lengths of 1
did not grow. *Revisit when* the first proposals of a pair are too short.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul

import numpy as np

from ssd.speculation.estimates import Calibration, Mean, size_class
from ssd.speculation.round_record import RoundRecord

CHOICE_ROUNDS = 8
"""Rounds between two choices."""
MIN_GAIN = 1.05
"""A change needs so many times the tokens per second: times of rounds differ by a few percent."""
USUAL_ACCEPTANCE = 0.75
"""Share of the sequences that accept the token at a position, of the sequences that accept all
tokens before it, misses included, until rounds are measured. The embedded pair has about .8 at
T = 0 and .65 at T = 1."""
START_ROUNDS = 8
"""Rounds that the acceptance counts for with which a number of sequences starts."""
FIXED_COLUMNS = 1.5
"""Columns that take as long as the part of a table that does not depend on its length."""
LEAST_WAIT, MOST_WAIT = 0.1, 2.0
"""Multiples of the time of a verify: shorter waits do not depend on the length, longer waits are
cut."""
FORGET_ROUNDS = 256
"""Rounds after which what was measured with longer proposals is forgotten, and rounds with a length
after which the waits of other lengths are. Texts and load change, and what is not chosen is not
measured again."""
MOST_FORGET_ROUNDS = 8 * FORGET_ROUNDS
"""The same, after trials of longer proposals that all came back to the same length."""
LEAST_VERIFY = 0.25
"""No estimate of a verify is shorter than this share of its calibrated time."""
_WINDOW = 64
"""Rounds in the means."""


@dataclass(slots=True)
class _Estimates:
    """Estimates of one range of running sequences."""

    largest: int
    kept_K: list[Mean]
    """Share of the sequences that accepted the token at each position, of the sequences that
    accepted all tokens before it, in rounds with proposals. Entries beyond the largest length keep
    their last value."""
    verify: dict[int, Mean] = field(default_factory=dict)
    """Seconds of a verify by columns, less the calibrated time."""
    host: Mean = field(default_factory=lambda: Mean(_WINDOW, 0.0))
    """Seconds of a round beside its verify and its wait."""
    waits: dict[int, Mean] = field(default_factory=dict)
    """Seconds for which a round waits for tables, by the largest length."""
    before: int = 0
    """The largest length when longer proposals were forgotten."""
    forgets_at: int = FORGET_ROUNDS
    """Rounds after which they are forgotten next."""
    pause: int = FORGET_ROUNDS
    """Rounds from then to the next time."""


class ProposalLength:
    """The largest length of proposals by running sequences. One thread."""

    def __init__(self, columns: tuple[int, ...], lookahead: int, calibration: Calibration) -> None:
        """Construct; see ``Controller``."""
        self._columns = columns
        self._lookahead = lookahead
        self._calibration = calibration
        self._by_range: dict[int, _Estimates] = {}

    def largest(self, num_sequences: int) -> int:
        """Return the largest length for a round of so many sequences."""
        return self._estimates(num_sequences).largest

    def add_round(self, record: RoundRecord, plain_seconds: float | None) -> None:
        """Add a round of speculation.

        Args:
            record: of the round.
            plain_seconds: of a round of plain decoding of so many sequences; None if no such round
                was measured. Not used with a calibration.
        """
        estimates = self._estimates(record.num_sequences)
        columns = next(count for count in self._columns if count >= record.columns)
        calibrated = self._calibration.verify_seconds(columns, record.num_sequences)
        # A prompt changes the shape of the verify, or of the pass before it.
        if not record.num_padding and not record.prompt_tokens:
            verify = estimates.verify.setdefault(columns, Mean(_WINDOW))
            verify.add(record.verify_seconds - calibrated)
        if record.num_auto == record.num_sequences and not record.prompt_tokens:
            # Tables of other sequences have K columns.
            wait = estimates.waits.setdefault(estimates.largest, Mean(_WINDOW))
            wait.add(min(record.wait_seconds, MOST_WAIT * record.verify_seconds))
            if wait.count % FORGET_ROUNDS == 0:
                # Other lengths may have been measured while a draft started.
                estimates.waits = {estimates.largest: wait}
        estimates.host.add(record.decode_seconds - record.verify_seconds - record.wait_seconds)
        if record.num_proposed:
            counts = [record.num_sequences, *record.num_accepted, 0]
            # Proposals that end earlier, with a shorter table, do not test a position.
            ended = [0, *record.num_ended, *[0] * len(counts)]
            for mean, (before, count), num_ended in zip(
                estimates.kept_K[: estimates.largest], pairwise(counts), ended, strict=False
            ):
                if before > num_ended:
                    mean.add(count / (before - num_ended))
        if estimates.host.count >= estimates.forgets_at:
            self._forget_longer(estimates)
        if estimates.host.count % CHOICE_ROUNDS == 0:
            self._choose(estimates, record.num_sequences, plain_seconds)

    def _forget_longer(self, estimates: _Estimates) -> None:
        """Drop the measured times and low acceptances of longer proposals."""
        largest = estimates.largest
        came_back = largest == estimates.before < self._lookahead
        pause = min(2 * estimates.pause, MOST_FORGET_ROUNDS) if came_back else FORGET_ROUNDS
        estimates.before, estimates.pause = largest, pause
        estimates.forgets_at = estimates.host.count + pause
        most = next(count for count in self._columns if count > largest)
        estimates.verify = {
            columns: mean for columns, mean in estimates.verify.items() if columns <= most
        }
        estimates.kept_K[largest:] = [
            Mean(_WINDOW, max(mean.value, USUAL_ACCEPTANCE), START_ROUNDS)
            for mean in estimates.kept_K[largest:]
        ]

    def _choose(
        self, estimates: _Estimates, num_sequences: int, plain_seconds: float | None = None
    ) -> None:
        if not self._calibration.seconds and plain_seconds is None:
            return
        rates = self._rates(estimates, num_sequences, plain_seconds)
        best = max(rates, key=lambda length: rates[length])
        count, forgot_at = estimates.host.count, estimates.forgets_at - estimates.pause
        # The way back from a trial needs no gain.
        is_way_back = best == estimates.before and count < forgot_at + FORGET_ROUNDS
        least_gain = 1.0 if is_way_back else MIN_GAIN
        if rates[best] > least_gain * rates.get(estimates.largest, 0.0):
            if best < estimates.before:
                # Perhaps the text is difficult for a while only.
                estimates.pause = FORGET_ROUNDS
                estimates.forgets_at = min(estimates.forgets_at, count + FORGET_ROUNDS)
            estimates.largest = best

    def _rates(
        self, estimates: _Estimates, num_sequences: int, plain_seconds: float | None
    ) -> Mapping[int, float]:
        """Return tokens per second of a sequence by the largest length of its proposals."""
        accepted_K = list(accumulate(_expected(estimates), mul))
        rates: dict[int, float] = {}
        for columns in self._columns:
            length = min(columns - 1, self._lookahead)
            if length == 0:
                continue
            tokens = 1.0 + sum(accepted_K[:length])
            seconds = self._round_seconds(estimates, columns, num_sequences, plain_seconds)
            rates[length] = tokens / seconds
        return rates

    def _round_seconds(
        self, estimates: _Estimates, columns: int, num_sequences: int, plain_seconds: float | None
    ) -> float:
        """Return the expected seconds of a round whose verify has so many columns."""
        host, measured = max(0.0, estimates.host.value), _measured(estimates.verify)
        waits = _measured(estimates.waits)
        if not self._calibration.seconds:
            assert plain_seconds is not None
            # Without one, the calibrated time is 1.
            wait = waits.get(estimates.largest, 0.0)
            seconds_of = {count: 1.0 + extra + host + wait for count, extra in measured.items()}
            seconds_of[1] = plain_seconds
            counts = sorted(seconds_of)
            return float(np.interp(columns, counts, [seconds_of[count] for count in counts]))
        rounds = sum(mean.count for mean in estimates.verify.values())
        total = sum(mean.value * mean.count for mean in estimates.verify.values())
        usual = total / rounds if rounds else 0.0

        def verify(count: int) -> float:
            seconds = self._calibration.verify_seconds(count, num_sequences)
            return max(LEAST_VERIFY * seconds, seconds + measured.get(count, usual))

        return host + verify(columns) + _wait(waits, columns - 1, verify)

    def _estimates(self, num_sequences: int) -> _Estimates:
        """Return the estimates for a number of sequences; new ones start with a first choice."""
        key = size_class(num_sequences)
        if key not in self._by_range:
            measured = [other for other, earlier in self._by_range.items() if earlier.host.count]
            if measured:
                nearest = min(measured, key=lambda other: abs(other - key))
                usual = [mean.value for mean in self._by_range[nearest].kept_K]
            else:
                usual = [USUAL_ACCEPTANCE] * self._lookahead
            means = [Mean(_WINDOW, share, START_ROUNDS) for share in usual]
            self._by_range[key] = estimates = _Estimates(self._lookahead, means)
            self._choose(estimates, num_sequences)
        return self._by_range[key]


def _measured(means: Mapping[int, Mean]) -> dict[int, float]:
    """Return the means of enough rounds."""
    return {key: mean.value for key, mean in means.items() if mean.count >= CHOICE_ROUNDS}


def _wait(waits: Mapping[int, float], length: int, verify: Callable[[int], float]) -> float:
    """Return the expected wait with proposals of at most this length.

    A longer table can be ready later. Two measured lengths give the time of a column. With one
    measured length, the time of a table is assumed to be in proportion to its columns.

    Args:
        waits: mean seconds by the lengths that were measured.
        length: of the proposals.
        verify: returns the seconds of a verify with so many columns.
    """
    if not waits or length in waits:
        return waits.get(length, 0.0)
    nearest, *others = sorted(waits, key=lambda measured: abs(measured - length))
    if waits[nearest] < LEAST_WAIT * verify(nearest + 1):
        return waits[nearest]
    ready = verify(nearest + 1) + waits[nearest]
    if others:
        slope = (ready - verify(others[0] + 1) - waits[others[0]]) / (nearest - others[0])
    else:
        slope = ready / (FIXED_COLUMNS + nearest)
    return max(0.0, ready + max(0.0, slope) * (length - nearest) - verify(length + 1))


def _expected(estimates: _Estimates) -> list[float]:
    """Return the share of tokens that each position is expected to keep.

    Positions beyond the largest length are not measured now. Their estimate moves halfway to the
    last measured position, unless that is the first position, whose share contains the misses.
    """
    kept_K = [mean.value for mean in estimates.kept_K]
    if (largest := estimates.largest) > 1:
        last = kept_K[largest - 1]
        kept_K[largest:] = [(share + last) / 2.0 for share in kept_K[largest:]]
    return kept_K
