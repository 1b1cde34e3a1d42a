"""Suspends a link whose tables are late in several consecutive rounds. Pure.

Source: speculation.md, section 7.
"""

LATE_ROUNDS = 3
"""Consecutive rounds without any table in time that open the circuit breaker."""
FIRST_OPEN_SECONDS = 5.0
MAX_OPEN_SECONDS = 60.0


class CircuitBreaker:
    """The circuit breaker of one link. While it is open, the link has no sessions.

    Guarded by the lock of ``DraftPool``.
    """

    def __init__(self) -> None:
        self._late_rounds = 0
        self._seconds = FIRST_OPEN_SECONDS
        self.open_until = 0.0
        """Time on the clock of ``add_round``; a past time means closed."""

    def is_open(self, now: float) -> bool:
        """Whether the link is suspended."""
        return now < self.open_until

    def add_round(self, now: float, *, any_in_time: bool) -> bool:
        """Add a round in which the link had open sessions; true if the circuit breaker opens."""
        if any_in_time:
            self._late_rounds = 0
            self._seconds = FIRST_OPEN_SECONDS
            return False
        self._late_rounds += 1
        if self._late_rounds < LATE_ROUNDS:
            return False
        self.open(now)
        return True

    def open(self, now: float) -> None:
        """Suspend the link, for twice as long as the last time if no round was in time since."""
        self._late_rounds = 0
        self.open_until = now + self._seconds
        self._seconds = min(2 * self._seconds, MAX_OPEN_SECONDS)
