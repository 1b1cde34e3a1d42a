"""How long the parts of one round take."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from ssd.ports import Clock


class RoundPart(StrEnum):
    """A part of a round that is timed, in order; the rest is bookkeeping."""

    PREFILL = "prefill"
    DRAFT = "draft"
    """Proposals of mode SYNCHRONOUS."""
    PREPARE = "prepare"
    """Build the batch: tokens, positions, entries, masks."""
    VERIFY = "verify"
    """The forward pass alone."""
    SAMPLE = "sample"
    """Select the target's tokens, verify, append."""
    STREAM = "stream"
    WAIT = "wait"
    """Look up the outcomes; wait for their tables."""
    COMMIT = "commit"
    NOISE = "noise"
    """Noise of the next round. The drafts work since the commit."""


class RoundTimes:
    """Times one round from its construction on. Step thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begun_at = clock.now()
        self.seconds = dict.fromkeys(RoundPart, 0.0)
        """Duration of each part that has ended."""
        self._part_ended_at = self.begun_at
        self.round_seconds = 0.0
        """Duration of the round, once it has ended."""

    @contextmanager
    def part(self, part: RoundPart) -> Iterator[None]:
        """Time a part of the round."""
        begun_at = self._clock.now()
        yield
        self._part_ended_at = self._clock.now()
        self.seconds[part] = self._part_ended_at - begun_at

    def note_lookups(self, at: float) -> None:
        """Note when the part WAIT, which has just ended, had its lookups; the rest was COMMIT."""
        self.seconds[RoundPart.COMMIT] = self._part_ended_at - at
        self.seconds[RoundPart.WAIT] -= self.seconds[RoundPart.COMMIT]

    def note_verify(self, seconds: float | None) -> None:
        """Note what the device measured; the part that waited for it was SAMPLE. None: nothing."""
        if seconds is not None:
            moved = max(0.0, seconds - self.seconds[RoundPart.VERIFY])
            self.seconds[RoundPart.VERIFY] += moved
            self.seconds[RoundPart.SAMPLE] -= min(moved, self.seconds[RoundPart.SAMPLE])

    def end(self) -> None:
        """End the round."""
        self.round_seconds = self._clock.now() - self.begun_at

    @property
    def host_seconds(self) -> float:
        """The round without its timed parts: the cost of all bookkeeping."""
        return max(0.0, self.round_seconds - sum(self.seconds.values()))
