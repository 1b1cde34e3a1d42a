"""What a link was measured to be, and what this target asks of its links.

A link is judged when it comes up, before it carries a session. One that grows slow later shows late
tables, which is what circuit_breaker is for.
"""

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ssd.errors import LinkError
from ssd.rpc.link import HANDSHAKE_SECONDS, LinkCall
from ssd.types import Draining, Heartbeat, Peer
from ssd_target.drafts.link import RoundTrip

NUM_PINGS = 9
"""Their median is the round trip: the first ones find cold caches, one in a hundred a busy loop."""
TOO_SLOW = "link_too_slow"
"""How the reason of a link begins that was refused for what was measured on it."""
_RANKS = {"any": 0, "tcp": 0, "rdma": 1, "nvlink": 2}
"""Transports from slow to fast; ``any`` is content with all, one not named here proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkQuality:
    """What was found on a link."""

    transport: str
    """``tcp``; ``rdma`` and ``nvlink`` once a channel exists that takes them."""
    round_trip_seconds: float


class LinkTooSlowError(LinkError):
    """A link is worse than the target requires; it serves on without it.

    Attributes:
        found: what was measured.
        peer: the draft.
    """

    def __init__(self, found: LinkQuality, peer: Peer, sentence: str) -> None:
        super().__init__(f"{TOO_SLOW}: {sentence}")
        self.found = found
        self.peer = peer


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRequirement:
    """What a link must be to be used."""

    transport: str = "any"
    """``any``, ``rdma`` or ``nvlink``: this one or a faster one."""
    max_round_trip_seconds: float = 0.0
    """0 sets no limit."""

    @property
    def asks_nothing(self) -> bool:
        """Whether every link will do, so that none has to be measured before it is used."""
        return self.transport == "any" and not self.max_round_trip_seconds

    def check(self, found: LinkQuality, peer: Peer) -> None:
        """Refuse a link that is worse.

        Raises:
            LinkTooSlowError: with what was found, what is allowed, and the cure.
        """
        micros, most = found.round_trip_seconds * 1e6, self.max_round_trip_seconds * 1e6
        if _RANKS.get(found.transport, 0) < _RANKS[self.transport]:
            raise LinkTooSlowError(
                found,
                peer,
                f"its transport is {found.transport} (round trip {micros:.0f} us), "
                f"{self.transport} is required: give the pods that transport, "
                "or require any",
            )
        if most and micros > most:
            raise LinkTooSlowError(
                found,
                peer,
                f"its round trip is {micros:.0f} us over {found.transport}, at most {most:.0f} us "
                "are allowed: place the draft nearer, or raise the limit",
            )


async def measure(call: LinkCall, now: Callable[[], float]) -> float:
    """Median seconds from a beat to its echo. Asks one at a time and takes no other message.

    Args:
        call: a link after Welcome, without sessions.
        now: seconds, of any clock.

    Raises:
        LinkError: the draft left, fell silent or said goodbye.
    """
    timer = RoundTrip()
    seconds: list[float] = []
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            while len(seconds) < NUM_PINGS:
                call.send(timer.beat(now()))
                await _echo(call, timer, now)
                seconds.append(timer.seconds)
    except TimeoutError as error:
        raise LinkError(
            f"{len(seconds)} of {NUM_PINGS} beats came back within {HANDSHAKE_SECONDS} s"
        ) from error
    return statistics.median(seconds)


async def _echo(call: LinkCall, timer: RoundTrip, now: Callable[[], float]) -> None:
    while True:
        message = await call.receive()
        if message is None:
            raise LinkError("the draft closed the link")
        if isinstance(message, Draining):
            raise LinkError("the draft is leaving")
        if isinstance(message, Heartbeat) and timer.hear(message, now()):
            return
