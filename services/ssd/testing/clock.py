"""A clock that changes only when a test advances it."""


class FakeClock:
    """Implements ``ports.Clock``."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time, which never decreases."""
        assert seconds >= 0
        self._now += seconds
