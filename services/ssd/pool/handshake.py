"""The handshake of a link: Hello, Welcome, its channel, and the measured round trip.

A link is measured once, before it has a session. A link that becomes slow later has late tables,
for which there is the circuit breaker.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.pool.link import DraftLink, RoundTrip
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials
from ssd.rpc.link import HANDSHAKE_SECONDS, ChannelStatus, LinkCall
from ssd.types import Draining, Heartbeat, Hello, Peer, Welcome

MAX_SESSIONS = 256
"""Maximum of a draft's ``max_sessions``. It bounds the frames that this target accepts."""
NUM_PINGS = 9
"""Heartbeats of a measurement. The result is their median: the first ones are slow because caches
are cold, and one in a hundred because the event loop is busy."""
TOO_SLOW = "link_too_slow"
"""Prefix of the reason of a link that was refused because of its measurement."""

Ring = Callable[[], None]
"""Wakes the task that writes the messages of a link."""
SetUpChannel = Callable[[LinkCall, Welcome, str], Awaitable[ChannelStatus]]
"""Sets up the collective channel of a link to an address, after a Welcome that has a backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """What all links of a target have in common."""

    set_up_channel: SetUpChannel | None = None
    """None for a target that has no backends."""
    max_round_trip_seconds: float = 0.0
    """A link is measured, and refused if it is slower; 0 sets no limit."""
    credentials: ClientCredentials = NO_CREDENTIALS
    """What the target presents, and which drafts it accepts."""
    doorbell: Callable[[Ring], AbstractContextManager[Ring]] | None = None
    """Makes a ``LinkCall.doorbell`` from its ``ring``."""


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


async def shake_hands(
    address: str,
    call: LinkCall,
    hello: Hello,
    terms: LinkTerms,
) -> DraftLink:
    """Return the link to which target and draft agree.

    Raises:
        HandshakeError: the draft does not fit this target, or this target does not fit the draft.
        LinkTooSlowError: the round trip is over the maximum.
        LinkError: the link is lost, or the draft does not answer.
    """
    call.send(hello)
    welcome = await _receive_welcome(call)
    check_welcome(hello, welcome)
    channel = ChannelStatus()
    if welcome.backend and terms.set_up_channel is not None:
        channel = await terms.set_up_channel(call, welcome, address)
    elif hello.backends:
        channel = ChannelStatus(
            reason=welcome.backend_refusal or "the draft does not have this channel"
        )
    if max_seconds := terms.max_round_trip_seconds:
        measured = channel.round_trip_seconds
        seconds = measured or await measure(call, asyncio.get_running_loop().time)
        if seconds > max_seconds:
            raise LinkTooSlowError(
                channel.transport, seconds, max_seconds=max_seconds, peer=welcome.peer
            )
    return DraftLink(address, welcome, call.send, channel)


def check_welcome(hello: Hello, welcome: Welcome) -> None:
    """Check that a Welcome fits the Hello.

    Raises:
        HandshakeError: they differ, the draft accepts too many sessions, it serves another
            tokenizer, or it chose a backend that was not offered.
    """
    if welcome.max_sessions > MAX_SESSIONS:
        raise HandshakeError(
            "max_sessions",
            f"the draft accepts {welcome.max_sessions} sessions, allowed are {MAX_SESSIONS}",
        )
    for name in ("epoch", "lookahead", "branches"):
        mine, theirs = getattr(hello, name), getattr(welcome, name)
        if mine != theirs:
            raise HandshakeError(name, f"this target has {mine}, the draft answered {theirs}")
    if welcome.tokenizer_fingerprint not in ("", hello.tokenizer_fingerprint):
        raise HandshakeError("tokenizer_fingerprint", "the draft serves another tokenizer")
    if welcome.backend and welcome.backend not in hello.backends:
        offered = ", ".join(hello.backends) or "none"
        raise HandshakeError("backend", f"the draft chose {welcome.backend}, offered: {offered}")


async def _receive_welcome(call: LinkCall) -> Welcome:
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            message = await call.receive()
    except TimeoutError as error:
        raise LinkError(f"no Welcome within {HANDSHAKE_SECONDS} s") from error
    if isinstance(message, bytes):
        raise FrameError("a frame before the Welcome")
    if not isinstance(message, Welcome):
        raise LinkError("the draft closed the link or sent another message before its Welcome")
    return message


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
