"""The handshake of a link: Hello, Welcome, and the measurement of the round trip."""

import asyncio

from ssd.errors import HandshakeError, LinkError
from ssd.rpc.link import HANDSHAKE_SECONDS, LinkCall, LinkFrames
from ssd.speculation.table import row_width
from ssd.transport.channels import CHANNELS
from ssd.transport.frame import FrameLimits
from ssd.types import Hello, Welcome
from ssd_target.drafts.link import DraftLink
from ssd_target.drafts.link_quality import LinkQuality, check_round_trip, measure

MAX_SESSIONS = 256
"""Maximum of a draft's ``max_sessions``. It bounds the frames that this target accepts."""


async def shake_hands(
    address: str, call: LinkCall, hello: Hello, max_round_trip_seconds: float = 0.0
) -> DraftLink:
    """Return the link to which target and draft agree.

    Args:
        address: of the draft.
        call: to the draft.
        hello: the first message.
        max_round_trip_seconds: the link is measured, and refused if it is slower; 0 sets no limit.

    Raises:
        HandshakeError: the draft does not fit this target, or this target does not fit the draft.
        LinkTooSlowError: the round trip is over the maximum.
        LinkError: the link is lost, or the draft does not answer.
    """
    call.send(hello)
    welcome = await _receive_welcome(call)
    check_welcome(hello, welcome)
    channel = CHANNELS[hello.channel](LinkFrames(call), frame_limits(welcome))
    if max_round_trip_seconds:
        seconds = await measure(call, asyncio.get_running_loop().time)
        quality = LinkQuality(transport=channel.transport, round_trip_seconds=seconds)
        check_round_trip(quality, welcome.peer, max_round_trip_seconds)
    return DraftLink(address, welcome, channel, call.send)


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


def frame_limits(welcome: Welcome) -> FrameLimits:
    """Return the limits of a frame with the tables of all sessions."""
    return FrameLimits(
        max_rows=max(1, welcome.max_sessions) * (welcome.branches + 1),
        max_width=row_width(welcome.lookahead),
    )


async def _receive_welcome(call: LinkCall) -> Welcome:
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            message = await call.receive()
    except TimeoutError as error:
        raise LinkError(f"no Welcome within {HANDSHAKE_SECONDS} s") from error
    if not isinstance(message, Welcome):
        raise LinkError("the draft closed the link or sent another message before its Welcome")
    return message
