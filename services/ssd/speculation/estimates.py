"""Running estimates over rounds, for the controller. Pure.

Times of rounds are kept as multiples of calibrated times, so that rounds of different numbers of
sequences are comparable.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ssd.speculation.round_record import RoundRecord

_PROMPT_WINDOW = 64
_DECAY = 0.98
_PRIOR_TESTED = 10.0
_MIN_ACCEPTANCE, _MAX_ACCEPTANCE = 0.05, 0.95
_CLIP = 2.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of a verify by (columns, sequences), measured at the start; empty is unknown."""

    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    _known: dict[tuple[int, int], float] = field(default_factory=dict, compare=False, repr=False)
    """Results of ``verify_seconds``, which is called several times a round."""

    def verify_seconds(self, columns: int, num_sequences: int) -> float:
        """Return the seconds of a verify, by linear interpolation between the measured sizes.

        Beyond the largest measured number of sequences, time grows in proportion. Beyond the
        measured columns, the time of the nearest measured column count applies. Without a
        measurement the result is 1.
        """
        key = columns, num_sequences
        if key not in self._known:
            self._known[key] = self._interpolate(columns, num_sequences)
        return self._known[key]

    def _interpolate(self, columns: int, num_sequences: int) -> float:
        if not self.seconds:
            return 1.0
        sizes = sorted({size for _, size in self.seconds})
        by_size = [self._of_size(columns, size) for size in sizes]
        seconds = float(np.interp(num_sequences, sizes, by_size))
        return seconds * max(1.0, num_sequences / sizes[-1])

    def _of_size(self, columns: int, size: int) -> float:
        counts = sorted(count for count, other in self.seconds if other == size)
        return float(np.interp(columns, counts, [self.seconds[count, size] for count in counts]))


@dataclass(slots=True)
class Mean:
    """A running mean: of all samples at first, later with the weight ``1 / window`` of each."""

    window: int
    value: float = 1.0
    count: int = 0

    def add(self, sample: float) -> None:
        """Add a sample."""
        self.count += 1
        self.value += (sample - self.value) / min(self.count, self.window)


def clipped_mean(samples: Sequence[float]) -> float:
    """Return the mean of some samples, each cut at ``_CLIP`` medians.

    A round that other work on the machine has interrupted would double the mean of a few.
    """
    largest = _CLIP * median(samples)
    return sum(min(sample, largest) for sample in samples) / len(samples)


def size_class(count: int) -> int:
    """Return the class of a number of sequences: 1, 2, 3 to 4, 5 to 8, 9 to 16, and so on."""
    return (count - 1).bit_length()


def doubled(most: int) -> list[int]:
    """Return 1, 2, 4... and ``most``."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


class Recent:
    """The clipped mean of the newest samples; a guess before the first one, which starts as 1."""

    def __init__(self, window: int) -> None:
        """Construct; ``window`` is the number of samples that count."""
        self._samples: deque[float] = deque(maxlen=window)
        self._value = 1.0
        self._is_guess = True
        """Whether there was no sample yet."""
        self._is_known = True
        """Whether ``_value`` is the mean of the current samples."""

    @property
    def count(self) -> int:
        """Samples that count."""
        return len(self._samples)

    def add(self, sample: float) -> None:
        """Add a sample."""
        self._samples.append(sample)
        self._is_known = self._is_guess = False

    def guess(self, value: float) -> None:
        """Set the value that holds until the first sample; no effect after it."""
        if self._is_guess:
            self._value = value

    @property
    def value(self) -> float:
        """The mean; many rounds add a sample and read none."""
        if not self._is_known:
            self._value, self._is_known = clipped_mean(self._samples), True
        return self._value

    def clear(self) -> None:
        """Drop all samples; the value remains until the next one."""
        self._value = self.value
        self._samples.clear()


class Acceptance:
    """Probability that a proposed token is accepted if all tokens before it are, or another rate.

    One thread.
    """

    def __init__(self, prior: float, decay: float = _DECAY) -> None:
        """Construct an estimate that starts at ``prior``.

        ``decay`` is the weight of the tokens of earlier rounds, for each round that follows.
        """
        self._prior = prior
        self._decay = decay
        self._num_tested = _PRIOR_TESTED
        self._num_accepted = _PRIOR_TESTED * prior

    def add(self, num_tested: int, num_accepted: int) -> None:
        """Add the tokens of a round."""
        if num_tested:
            self._num_tested = self._decay * self._num_tested + num_tested
            self._num_accepted = self._decay * self._num_accepted + num_accepted

    @property
    def rate(self) -> float:
        """The estimate."""
        return min(max(self._num_accepted / self._num_tested, _MIN_ACCEPTANCE), _MAX_ACCEPTANCE)


class PassTimes:
    """The times of verifies that store no prompts, divided by those of the calibration.

    They are kept by powers of two of their rows. Before the first measurement, a verify without
    prompts is assumed to take its calibrated time, or one second if the calibration is unknown.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._times: dict[int, Mean] = {}

    def add_round(self, record: RoundRecord) -> None:
        """Add the verify of a round."""
        mean = self._times.setdefault(record.num_rows.bit_length(), Mean(_PROMPT_WINDOW))
        mean.add(record.verify_seconds / self._calibrated(record))

    def divide(self, record: RoundRecord) -> None:
        """Count as prefill what a verify that stores prompts took beyond one that does not."""
        times = _nearest(self._times, record.num_rows) if self._times else 1.0
        stored = max(0.0, record.verify_seconds - times * self._calibrated(record))
        record.verify_seconds -= stored
        record.prefill_seconds += stored

    def _calibrated(self, record: RoundRecord) -> float:
        return self._calibration.verify_seconds(record.columns, record.num_sequences)


def _nearest(means: Mapping[int, Mean], count: int) -> float:
    """Return the value of the power of two that is nearest to a count."""
    key = count.bit_length()
    return means[min(means, key=lambda other: abs(other - key))].value


MAX_CHUNK_TIMES = 4.0
"""A chunk that is longer counts as so many usual ones."""


class PromptTimes:
    """The time of a chunk of a prompt while no draft works, a token, by powers of two of tokens.

    Drafts that share a CPU or the memory bus with the target make chunks slower. That time is a
    cost of speculation, and chunks of different sizes are not comparable with each other.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, Mean] = {}

    def add_round(self, record: RoundRecord) -> None:
        """Add the chunk of a round of plain decoding, if it has one."""
        if record.prompt_tokens:
            key = record.prompt_tokens.bit_length()
            mean = self._seconds.setdefault(key, Mean(_PROMPT_WINDOW))
            mean.add(record.prefill_seconds / record.prompt_tokens)

    def lost_seconds(self, record: RoundRecord) -> float:
        """Return how much longer a chunk took than in plain decoding, by the nearest measured size.

        The result is negative if the chunk was faster than usual, so that its mean has no bias. It
        is 0 without a chunk, or if nothing is measured. A much longer chunk shows a pause of the
        machine, of which it has a part.
        """
        if not record.prompt_tokens or not self._seconds:
            return 0.0
        usual = record.prompt_tokens * _nearest(self._seconds, record.prompt_tokens)
        return min(record.prefill_seconds, MAX_CHUNK_TIMES * usual) - usual
