"""The handshake of a link: Hello, Welcome, its channel, and the measured round trip."""

import asyncio
from dataclasses import dataclass

from ssd.errors import HandshakeError, LinkError
from ssd.link_channel import LinkChannel, OfferChannel, offer_grpc
from ssd.pool.link import DraftLink
from ssd.pool.link_quality import LinkQuality, check_round_trip, measure
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials
from ssd.rpc.link import HANDSHAKE_SECONDS, LinkCall
from ssd.types import Hello, Welcome

MAX_SESSIONS = 256
"""Maximum of a draft's ``max_sessions``. It bounds the frames that this target accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """What all links of a target have in common."""

    offer_channel: OfferChannel = offer_grpc
    """Sets up the tensor channel of a link."""
    max_round_trip_seconds: float = 0.0
    """A link is measured, and refused if it is slower; 0 sets no limit."""
    credentials: ClientCredentials = NO_CREDENTIALS
    """What the target presents, and which drafts it accepts."""


async def shake_hands(
    address: str,
    call: LinkCall,
    hello: Hello,
    terms: LinkTerms,
) -> DraftLink:
    """Return the link to which target and draft agree.

    Args:
        address: of the draft.
        call: to the draft.
        hello: the first message.
        terms: of this target.

    Raises:
        HandshakeError: the draft does not fit this target, or this target does not fit the draft.
        LinkTooSlowError: the round trip is over the maximum.
        LinkError: the link is lost, or the draft does not answer.
    """
    call.send(hello)
    welcome = await _receive_welcome(call)
    check_welcome(hello, welcome)
    found = await terms.offer_channel(call, hello, welcome, address)
    link = DraftLink(address, welcome, found, call.send)
    try:
        if terms.max_round_trip_seconds:
            seconds = await _round_trip(call, found)
            quality = LinkQuality(transport=link.transport, round_trip_seconds=seconds)
            check_round_trip(quality, welcome.peer, terms.max_round_trip_seconds)
    except BaseException:
        await link.end()
        raise
    return link


def check_welcome(hello: Hello, welcome: Welcome) -> None:
    """Compare the values of a Welcome with those of the Hello.

    Raises:
        HandshakeError: they differ, or the draft accepts too many sessions.
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


async def _round_trip(call: LinkCall, found: LinkChannel) -> float:
    """Return the seconds of a round trip over the channel; see ``measure``."""
    if found.quality is not None:
        return found.quality.round_trip_seconds
    return await measure(call, asyncio.get_running_loop().time)


async def _receive_welcome(call: LinkCall) -> Welcome:
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            message = await call.receive()
    except TimeoutError as error:
        raise LinkError(f"no Welcome within {HANDSHAKE_SECONDS} s") from error
    if not isinstance(message, Welcome):
        raise LinkError("the draft closed the link or sent another message before its Welcome")
    return message
