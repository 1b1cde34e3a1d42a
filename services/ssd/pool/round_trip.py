"""The round trip of a link, measured with heartbeats."""

from ssd.types import Heartbeat


class RoundTrip:
    """Measures the time from a heartbeat to its echo.

    Asyncio loop. One heartbeat at a time has a nonce, so a slow echo is measured in full.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """The newest measurement; 0 before the first."""
        self._nonce = 0
        self._sent_at: float | None = None

    def next_heartbeat(self, now: float) -> Heartbeat:
        """Return the next heartbeat to send."""
        if self._sent_at is not None:
            return Heartbeat()
        self._nonce += 1
        self._sent_at = now
        return Heartbeat(nonce=self._nonce)

    def receive(self, heartbeat: Heartbeat, now: float) -> bool:
        """Note a heartbeat of the draft; true if it was the echo and a measurement."""
        if self._sent_at is None or heartbeat.echo != self._nonce:
            return False
        self.seconds = now - self._sent_at
        self._sent_at = None
        return True
