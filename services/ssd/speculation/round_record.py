"""What one round of a target did and how long its parts took.

The thread of the rounds fills one record each round. The metrics, the log of the newest rounds, the
statistics of requests and the controller read it.
"""

from dataclasses import dataclass, field
from operator import attrgetter

from ssd.types import LookupResult

PARTS = ("draft", "prepare", "verify", "sample", "stream", "wait", "commit", "noise")
"""Timed parts of a round without prefill: draft (mode SYNCHRONOUS proposes), prepare (inputs of the
forward pass), verify (the forward pass), sample (select tokens, append), stream, wait (look up,
wait for tables), commit, noise (of the next round)."""
_part_seconds = attrgetter(*(f"{part}_seconds" for part in PARTS))
_ANSWERED = (LookupResult.HIT, LookupResult.MISS, LookupResult.LATE, LookupResult.BACKUP)


@dataclass(slots=True, kw_only=True)
class RoundRecord:
    """One round. Seconds of a part are 0 until it has ended."""

    begun_at: float = 0.0
    stored_at: float = 0.0
    """When the parts of texts were stored that the round needs."""
    prompt_tokens: int = 0
    """Tokens of prompts that were stored before the verify or by it."""
    num_sessions: int = 0
    """Sessions of the target on its drafts, open or opening."""
    num_sequences: int = 0
    """Sequences of the round, B."""
    num_auto: int = 0
    """Sequences whose speculation the controller chooses."""
    num_tokens: int = 0
    """Tokens that the sequences gained together."""
    num_proposed: int = 0
    """Proposed tokens of all sequences."""
    columns: int = 1
    """Rows of the sequence with the longest proposal."""
    num_padding: int = 0
    """Rows of the verify that only keep its shape."""
    num_accepted: list[int] = field(default_factory=list)
    """Sequences whose proposed token at each position was accepted, up to the last such position.
    """
    num_ended: list[int] = field(default_factory=list)
    """Of these, the sequences whose proposal has no token after that position."""
    lookups: dict[LookupResult, int] = field(default_factory=dict)
    """Sequences by the result of their lookup."""
    decided_at: float = 0.0
    """When the outcomes were known."""
    seconds: float = 0.0
    """T_round, from the begin to the end, with the prefill."""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    prepare_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0
    stream_seconds: float = 0.0
    wait_seconds: float = 0.0
    commit_seconds: float = 0.0
    noise_seconds: float = 0.0

    def add_outcome(self, num_proposed: int, num_accepted: int, num_tokens: int) -> None:
        """Add a sequence that gained ``num_tokens``."""
        self.num_sequences += 1
        self.num_tokens += num_tokens
        if num_proposed:
            self.num_proposed += num_proposed
            self.columns = max(self.columns, 1 + num_proposed)
            for counts in (self.num_accepted, self.num_ended):
                counts.extend([0] * (num_accepted - len(counts)))
            for position in range(num_accepted):
                self.num_accepted[position] += 1
            if num_accepted == num_proposed:
                self.num_ended[num_proposed - 1] += 1

    def add_lookup(self, result: LookupResult) -> None:
        """Add the result of a lookup."""
        self.lookups[result] = self.lookups.get(result, 0) + 1

    def set_device_time(self, seconds: float | None) -> None:
        """Replace the time of the verify by what its device measured; None keeps it.

        The sampling, which waited for the device, was shorter by the difference.
        """
        if seconds is not None:
            moved = max(0.0, seconds - self.verify_seconds)
            self.verify_seconds += moved
            self.sample_seconds -= min(moved, self.sample_seconds)

    @property
    def num_rows(self) -> int:
        """Rows of the verify, without prompts and padding."""
        return self.num_sequences + self.num_proposed

    @property
    def num_answered(self) -> int:
        """Sequences with an open session: a table, or proposals of the backup that replace it."""
        return sum(self.lookups.get(result, 0) for result in _ANSWERED)

    @property
    def is_plain(self) -> bool:
        """Whether the round was plain decoding, and no draft worked for it."""
        return self.num_sessions == 0 and self.num_proposed == 0

    @property
    def host_seconds(self) -> float:
        """The round without its timed parts: the cost of all bookkeeping."""
        timed: float = sum(_part_seconds(self))
        return max(0.0, self.decode_seconds - timed)

    @property
    def decode_seconds(self) -> float:
        """T_round without the prefill of other sequences."""
        return self.seconds - self.prefill_seconds
