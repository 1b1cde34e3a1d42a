"""How long a round waits for tables, and which links are not waited for at all. Pure.

Source: speculation.md section 7. A row never holds up its batch mates for longer than the cap, and
a link whose tables keep coming late is left alone for a while.
"""

import numpy as np

_WINDOW = 128
"""Table latencies that are remembered."""
_REFRESH = 8
"""Observations between two looks at the distribution."""
_MARGIN = 1.5
"""Times the 95th percentile that a table may take before it counts as lost."""
_SLACK_SECONDS = 0.002
LATE_ROUNDS = 3
"""Consecutive rounds without any table in time that put a link in circuit_breaker."""
FIRST_QUARANTINE_SECONDS = 5.0
LONGEST_QUARANTINE_SECONDS = 60.0
OPENING_SECONDS = 5.0
OPENING_SECONDS_A_TOKEN = 0.005
"""Slower than any draft that is worth having, also while it serves others: it grows up to four
batches of tables between two chunks of a prompt."""
FORGIVEN_AFTER_ROUNDS = 50
"""Rounds in time after which the next circuit_breaker is a first one again."""


class TableDeadline:
    """The deadline of a link's tables, counted from the commit that asks for them.

    ``limit_seconds`` is infinite until enough tables were seen, and always when not adaptive: the
    cap of the round holds then.
    """

    def __init__(self, *, is_adaptive: bool) -> None:
        self._is_adaptive = is_adaptive
        self._latencies = np.zeros(_WINDOW)
        self._num_seen = 0
        self.limit_seconds = float("inf")

    def observe(self, latency_seconds: float) -> None:
        """Note that a table came this long after its commit."""
        self._latencies[self._num_seen % _WINDOW] = latency_seconds
        self._num_seen += 1
        if self._is_adaptive and self._num_seen >= 16 and self._num_seen % _REFRESH == 0:
            known = self._latencies[: min(self._num_seen, _WINDOW)]
            self.limit_seconds = float(np.quantile(known, 0.95)) * _MARGIN + _SLACK_SECONDS

    def forget(self) -> None:
        """Start over: after a round without tables only the cap says how long to wait."""
        self._num_seen = 0
        self.limit_seconds = float("inf")

    @property
    def median_seconds(self) -> float:
        """Median latency of the tables that are remembered; 0 before the first one."""
        known = self._latencies[: min(self._num_seen, _WINDOW)]
        return float(np.median(known)) if known.size else 0.0


class CircuitBreaker:
    """Counts the rounds that a link was late in, and says until when it is left alone."""

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._late_rounds = 0
        self._timely_rounds = 0
        self._seconds = FIRST_QUARANTINE_SECONDS
        self.until = 0.0
        """Time on the clock of ``note_round``; in the past means in service."""

    def is_active(self, now: float) -> bool:
        """Whether the link is to be left alone."""
        return now < self.until

    def note_round(self, now: float, *, any_in_time: bool) -> bool:
        """Note a round in which the link had opened sessions; true if a circuit_breaker begins."""
        if any_in_time:
            self._late_rounds = 0
            self._timely_rounds += 1
            if self._timely_rounds >= FORGIVEN_AFTER_ROUNDS:
                self._seconds = FIRST_QUARANTINE_SECONDS
            return False
        self._late_rounds += 1
        self._timely_rounds = 0
        return self._late_rounds >= LATE_ROUNDS and self.begin(now)

    def begin(self, now: float) -> bool:
        """Leave the link alone, twice as long as last time; false where that is switched off."""
        if not self._is_enabled:
            return False
        self._late_rounds = 0
        self._timely_rounds = 0
        self.until = now + self._seconds
        self._seconds = min(2 * self._seconds, LONGEST_QUARANTINE_SECONDS)
        return True


def opening_seconds(num_tokens: int) -> float:
    """How long a draft may take until the first table, with so many tokens to prefill before it."""
    return OPENING_SECONDS + num_tokens * OPENING_SECONDS_A_TOKEN
