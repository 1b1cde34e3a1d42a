"""A clock that stands still until a test moves it."""


class FakeClock:
    """Implements ``ports.Clock``."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on; time never goes back."""
        assert seconds >= 0
        self._now += seconds
