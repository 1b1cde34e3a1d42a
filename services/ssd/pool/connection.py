"""A link that is up: its messages go to the pool, and heartbeats show that both ends work."""

import asyncio

from ssd.errors import FrameError, LinkError
from ssd.observability.log import get_logger
from ssd.observability.metrics import (
    BAD_FRAMES_TOTAL,
    LINK_BANDWIDTH,
    LINK_RTT_SECONDS,
    LINK_STATE,
    LINK_TRANSPORT_INFO,
    remove_series,
)
from ssd.pool.link import DraftLink, LinkState
from ssd.pool.pool import DraftPool
from ssd.pool.reports import LinkReport, LinkReports
from ssd.rpc.link import HEARTBEAT_SECONDS, LEASE_SECONDS, LinkCall
from ssd.tasks import first_result
from ssd.types import Draining, Heartbeat, SessionRefused

_log = get_logger(__name__)


async def serve(
    link: DraftLink, call: LinkCall, pool: DraftPool, reports: LinkReports
) -> LinkError:
    """Serve a link from its handshake to its end; return the cause. Asyncio loop."""
    pool.attach(link)
    reports.set(LinkReport(link.name, LinkState.ACTIVE, link=link))
    channel = link.channel
    LINK_TRANSPORT_INFO.labels(draft=link.name, transport=channel.transport).set(1)
    if channel.bytes_per_second:
        LINK_BANDWIDTH.labels(draft=link.name).set(channel.bytes_per_second)
    error = LinkError("cancelled")
    try:
        error = await first_result(
            _receive(link, call, pool, reports), _send_heartbeats(link, call, pool)
        )
    finally:
        remove_series(LINK_TRANSPORT_INFO, link.name, channel.transport)
        if channel.bytes_per_second:
            remove_series(LINK_BANDWIDTH, link.name)
        pool.detach(link, str(error))
    return error


async def _receive(
    link: DraftLink, call: LinkCall, pool: DraftPool, reports: LinkReports
) -> LinkError:
    """Receive the draft's messages until the link ends; return the cause."""
    now = asyncio.get_running_loop().time
    try:
        while (message := await call.receive()) is not None:
            match message:
                case bytes():
                    pool.receive(link, message)
                case Heartbeat():
                    link.work_seconds = message.batch_seconds or link.work_seconds
                    if link.round_trip.receive(message, now()):
                        LINK_RTT_SECONDS.labels(draft=link.name).set(link.round_trip.seconds)
                case SessionRefused():
                    pool.refuse(link, message)
                case Draining():
                    pool.drain(link)
                    reports.set(LinkReport(link.name, LinkState.DRAINING, link=link))
                case _:
                    pass
    except FrameError as error:
        BAD_FRAMES_TOTAL.inc()
        _log.warning("bad_frame", draft=link.name, reason=str(error))
        return error
    except LinkError as error:
        return error
    return LinkError("the draft closed the link")


async def _send_heartbeats(link: DraftLink, call: LinkCall, pool: DraftPool) -> LinkError:
    """Send heartbeats until the link is lost or its lease ends; return the cause."""
    now = asyncio.get_running_loop().time
    while link.lost_because is None:
        if call.silent_seconds > LEASE_SECONDS:
            return LinkError(f"no message for {LEASE_SECONDS} s")
        try:
            call.send(link.round_trip.next_heartbeat(now()))
        except LinkError as error:
            return error
        LINK_STATE.labels(draft=link.name).set(pool.state(link) is LinkState.ACTIVE)
        await asyncio.sleep(HEARTBEAT_SECONDS)
    return LinkError(link.lost_because)
