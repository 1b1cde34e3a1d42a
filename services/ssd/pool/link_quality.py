"""The measured quality of a link, and the round trip that this target allows.

A link is measured once, before it has a session. A link that becomes slow later has late tables,
for which there is the circuit breaker.
"""

import asyncio
import statistics
from collections.abc import Callable

from ssd.errors import FrameError, LinkError
from ssd.rpc.link import HANDSHAKE_SECONDS, LinkCall
from ssd.types import Draining, Heartbeat, Peer

NUM_PINGS = 9
"""Heartbeats of a measurement. The result is their median: the first ones are slow because caches
are cold, and one in a hundred because the event loop is busy."""
TOO_SLOW = "link_too_slow"
"""Prefix of the reason of a link that was refused because of its measurement."""


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
        """Receive a heartbeat of the draft; true if it was the echo and a measurement."""
        if self._sent_at is None or heartbeat.echo != self._nonce:
            return False
        self.seconds = now - self._sent_at
        self._sent_at = None
        return True


class LinkTooSlowError(LinkError):
    """The round trip of a link is over the maximum; the target continues without it.

    Attributes:
        transport: how the bytes of the channel travel, for example ``tcp``.
        round_trip_seconds: the measurement.
        peer: the draft.
    """

    def __init__(
        self, transport: str, round_trip_seconds: float, *, max_seconds: float, peer: Peer
    ) -> None:
        super().__init__(
            f"{TOO_SLOW}: its round trip is {round_trip_seconds * 1e6:.0f} us over {transport}, "
            f"at most {max_seconds * 1e6:.0f} us are allowed: "
            "place the draft nearer, or raise the limit"
        )
        self.transport = transport
        self.round_trip_seconds = round_trip_seconds
        self.peer = peer


async def measure(call: LinkCall, now: Callable[[], float]) -> float:
    """Return the median seconds from a heartbeat to its echo.

    Args:
        call: a link after Welcome, without sessions. Only heartbeats are sent and read.
        now: returns the seconds of any clock.

    Raises:
        LinkError: the draft closed the link, sent ``Draining`` or no echo.
    """
    round_trip = RoundTrip()
    seconds: list[float] = []
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            while len(seconds) < NUM_PINGS:
                call.send(round_trip.next_heartbeat(now()))
                await _receive_echo(call, round_trip, now)
                seconds.append(round_trip.seconds)
    except TimeoutError as error:
        raise LinkError(
            f"{len(seconds)} of {NUM_PINGS} heartbeats were echoed within {HANDSHAKE_SECONDS} s"
        ) from error
    return statistics.median(seconds)


async def _receive_echo(call: LinkCall, round_trip: RoundTrip, now: Callable[[], float]) -> None:
    while True:
        message = await call.receive()
        if message is None:
            raise LinkError("the draft closed the link")
        if isinstance(message, bytes):
            raise FrameError("a frame before the end of the handshake")
        if isinstance(message, Draining):
            raise LinkError("the draft is leaving")
        if isinstance(message, Heartbeat) and round_trip.receive(message, now()):
            return
