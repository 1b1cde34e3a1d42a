"""What rounds measure for the controller: samples, and running estimates over them. Pure.

Times of rounds are kept as multiples of calibrated times, so that rounds of different numbers of
sequences are comparable. Letters: **B** sequences, **K** proposed tokens.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

_PROMPT_WINDOW = 64
_CLIP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSample:
    """The measurements of one round."""

    num_sequences: int
    """Sequences of the round, B."""
    num_auto: int
    """Sequences whose speculation the controller chooses."""
    num_sessions: int
    """Sessions of the target on its drafts, open or opening."""
    num_answered: int
    """Sequences whose outcome was looked up in a table: hits, misses and late tables."""
    num_tokens: int
    """Tokens that the sequences gained together."""
    columns: int
    """Rows of the sequence with the longest proposal."""
    num_proposed: int
    """Proposed tokens of all sequences."""
    num_accepted_K: tuple[int, ...]
    """Sequences whose proposed token at each position was accepted."""
    seconds: float
    """T_round without the prefill of other sequences."""
    verify_seconds: float
    prompt_tokens: int = 0
    """Tokens of the chunk of a prompt that was stored before the verify."""
    prefill_seconds: float = 0.0
    """Time of that chunk."""

    @property
    def is_plain(self) -> bool:
        """Whether the round was plain decoding, and no draft worked for it."""
        return self.num_sessions == 0 and self.num_proposed == 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of a verify by (columns, sequences), measured at the start; empty is unknown.

    Each number of sequences is measured with the same numbers of columns.
    """

    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    _known: dict[tuple[int, int], float] = field(default_factory=dict, compare=False, repr=False)
    """Results of ``verify_seconds``, which is called several times a round."""

    def verify_seconds(self, columns: int, num_sequences: int) -> float:
        """Return the seconds of a verify, by linear interpolation between the measured sizes.

        Beyond the largest measured number of sequences, time grows in proportion. Beyond the
        measured columns, it is that of the nearest ones. Without a measurement the result is 1.
        """
        key = columns, num_sequences
        if key not in self._known:
            self._known[key] = self._interpolate(columns, num_sequences)
        return self._known[key]

    def _interpolate(self, columns: int, num_sequences: int) -> float:
        if not self.seconds:
            return 1.0
        counts = sorted({count for count, _ in self.seconds})
        sizes = sorted({size for _, size in self.seconds})
        size = min(num_sequences, sizes[-1])
        by_columns = [
            float(np.interp(size, sizes, [self.seconds[count, each] for each in sizes]))
            for count in counts
        ]
        return float(np.interp(columns, counts, by_columns)) * max(1.0, num_sequences / sizes[-1])


@dataclass(slots=True)
class Mean:
    """A running mean: of all samples at first, later with the weight ``1 / window`` of each."""

    window: int
    value: float = 1.0
    count: int = 0

    def note(self, sample: float) -> None:
        """Add a sample."""
        self.count += 1
        self.value += (sample - self.value) / min(self.count, self.window)


def clipped_mean(samples: Sequence[float]) -> float:
    """Return the mean of some samples, of which those above ``_CLIP`` medians count as so much.

    A round that other work on the machine has interrupted would double the mean of a few.
    """
    largest = _CLIP * median(samples)
    return sum(min(each, largest) for each in samples) / len(samples)


class Recent:
    """The clipped mean of the newest samples; 1 without any."""

    def __init__(self, window: int) -> None:
        """Construct; ``window`` is the number of samples that count."""
        self._samples: deque[float] = deque(maxlen=window)
        self.value = 1.0

    @property
    def count(self) -> int:
        """Samples that count."""
        return len(self._samples)

    def note(self, sample: float) -> None:
        """Add a sample."""
        self._samples.append(sample)
        self.value = clipped_mean(self._samples)

    def clear(self) -> None:
        """Drop all samples; the value remains until the next one."""
        self._samples.clear()


class PromptTimes:
    """The time of a chunk of a prompt while no draft works, a token, by powers of two of tokens.

    Drafts that share a CPU or the memory bus with the target make chunks slower. That time is a
    cost of speculation, and chunks of different sizes are not comparable with each other.
    """

    def __init__(self) -> None:
        """Construct; nothing is known."""
        self._seconds: dict[int, Mean] = {}

    def note(self, sample: RoundSample) -> None:
        """Note the chunk of a round of plain decoding, if it has one."""
        if not sample.prompt_tokens:
            return
        key = sample.prompt_tokens.bit_length()
        mean = self._seconds.setdefault(key, Mean(_PROMPT_WINDOW))
        mean.note(sample.prefill_seconds / sample.prompt_tokens)

    def lost_seconds(self, sample: RoundSample) -> float:
        """Return the time of a chunk beyond that of plain decoding, of the nearest known size.

        It is negative if the chunk was faster than usual, so that its mean has no bias. It is 0
        without a chunk, or if nothing is known.
        """
        if not sample.prompt_tokens or not self._seconds:
            return 0.0
        key = sample.prompt_tokens.bit_length()
        nearest = min(self._seconds, key=lambda known: abs(known - key))
        return sample.prefill_seconds - sample.prompt_tokens * self._seconds[nearest].value
