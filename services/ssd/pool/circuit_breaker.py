"""Suspends a link that sends no tables. Pure.

Source: speculation.md, section 7.
"""

SILENT_ROUNDS = 3
"""Consecutive rounds without a table that open the circuit breaker."""
FIRST_OPEN_SECONDS = 5.0
MAX_OPEN_SECONDS = 60.0


class CircuitBreaker:
    """The circuit breaker of one link. While it is open, the link has no sessions.

    Guarded by the lock of ``DraftPool``.
    """

    def __init__(self) -> None:
        self._silent_rounds = 0
        self._seconds = FIRST_OPEN_SECONDS
        self.open_until = 0.0
        """Time on the clock of ``add_round``; a past time means closed."""

    def is_open(self, now: float) -> bool:
        """Whether the link is suspended."""
        return now < self.open_until

    def add_round(self, now: float, *, is_silent: bool) -> bool:
        """Add a round in which the link had open sessions; true if the circuit breaker opens."""
        if not is_silent:
            self._silent_rounds = 0
            self._seconds = FIRST_OPEN_SECONDS
            return False
        self._silent_rounds += 1
        if self._silent_rounds < SILENT_ROUNDS:
            return False
        self.open(now)
        return True

    def open(self, now: float) -> None:
        """Suspend the link, for twice as long as the last time if no table has arrived since."""
        self._silent_rounds = 0
        self.open_until = now + self._seconds
        self._seconds = min(2 * self._seconds, MAX_OPEN_SECONDS)
