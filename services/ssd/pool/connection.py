"""A link that is up: its messages go to the pool, and heartbeats show that both ends work."""

import asyncio

from ssd.errors import FrameError, LinkError
from ssd.pool.link import DraftLink, LinkState
from ssd.pool.pool import DraftPool
from ssd.pool.reports import LinkReport, LinkReports
from ssd.pool.round_trip import RoundTrip
from ssd.rpc.link import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    LinkCall,
    as_link_error,
    first_result,
)
from ssd.telemetry import (
    BAD_FRAMES_TOTAL,
    LINK_BANDWIDTH,
    LINK_RTT_SECONDS,
    LINK_STATE,
    LINK_TRANSPORT_INFO,
    get_logger,
)
from ssd.transport.frame import Frame
from ssd.types import Draining, Heartbeat, SessionRefused

_log = get_logger(__name__)


class Connection:
    """Serves one link from its handshake to its end.

    Asyncio loop.
    """

    def __init__(
        self, link: DraftLink, call: LinkCall, pool: DraftPool, reports: LinkReports
    ) -> None:
        self._link = link
        self._call = call
        self._pool = pool
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[LinkError] = self._loop.create_future()

    async def serve(self) -> LinkError:
        """Serve the link until it ends; return the cause."""
        link = self._link
        link.start(self._on_frame, lambda error: self._end(as_link_error(error)))
        self._pool.attach(link)
        self._reports.set(LinkReport(link.name, LinkState.ACTIVE, link=link))
        LINK_TRANSPORT_INFO.labels(draft=link.name, transport=link.transport).set(1)
        quality = link.channel.quality
        if quality is not None:
            LINK_BANDWIDTH.labels(draft=link.name).set(quality.bytes_per_second)
        error = LinkError("cancelled")
        try:
            error = await first_result(self._ended, self._receive(), self._send_heartbeats())
        finally:
            LINK_TRANSPORT_INFO.remove(link.name, link.transport)
            if quality is not None:
                LINK_BANDWIDTH.remove(link.name)
            self._pool.detach(link, str(error))
            link.close()
        return error

    async def _receive(self) -> LinkError:
        """Receive the draft's control messages until the link ends; return the cause."""
        while True:
            try:
                async with asyncio.timeout(LEASE_SECONDS):
                    message = await self._call.receive()
            except TimeoutError:
                return LinkError(f"no message for {LEASE_SECONDS} s")
            except LinkError as error:
                return error
            match message:
                case None:
                    return LinkError("the draft closed the link")
                case Heartbeat():
                    self._note_heartbeat(message)
                case SessionRefused():
                    self._pool.refuse(self._link, message)
                case Draining():
                    self._pool.drain(self._link)
                    name = self._link.name
                    self._reports.set(LinkReport(name, LinkState.DRAINING, link=self._link))
                case _:
                    pass

    async def _send_heartbeats(self) -> LinkError:
        """Send heartbeats until the link is lost; return the cause."""
        link = self._link
        while link.lost_because is None:
            try:
                self._call.send(link.round_trip.next_heartbeat(self._loop.time()))
            except LinkError as error:
                return error
            LINK_STATE.labels(draft=link.name).set(self._pool.state(link) is LinkState.ACTIVE)
            await asyncio.sleep(HEARTBEAT_SECONDS)
        return LinkError(link.lost_because)

    def _note_heartbeat(self, heartbeat: Heartbeat) -> None:
        round_trip: RoundTrip = self._link.round_trip
        if round_trip.receive(heartbeat, self._loop.time()):
            LINK_RTT_SECONDS.labels(draft=self._link.name).set(round_trip.seconds)

    def _on_frame(self, frame: Frame) -> None:
        if self._ended.done():
            return
        try:
            self._pool.receive(self._link, frame)
        except FrameError as error:
            BAD_FRAMES_TOTAL.inc()
            _log.warning("bad_frame", draft=self._link.name, reason=str(error))
            self._end(error)

    def _end(self, error: LinkError) -> None:
        if not self._ended.done():
            self._ended.set_result(error)
