"""Opens one link to each draft, serves it, and opens it again when it ends.

A lost link is dialled again within a second. A link that was refused, or whose draft broke the
protocol, is dialled again after 10 s. The pause grows for a link whose round trip is too long. DNS
names are resolved every 2 s. New addresses are dialled. Addresses that disappear are not dialled
again, but a link that is up stays: a draft loses its address whenever its readiness probe fails
once, and it sends ``Draining`` when it leaves for good. Heartbeats show that both ends of a link
work.
"""

import asyncio
import contextlib
import itertools
import random
from dataclasses import replace
from typing import NamedTuple

from ssd.addresses import Addresses, Resolver, resolve
from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.observability.log import get_logger
from ssd.observability.metrics import (
    BAD_FRAMES_TOTAL,
    LINK_BANDWIDTH,
    LINK_REFUSALS_TOTAL,
    LINK_RTT_SECONDS,
    LINK_STATE,
    LINK_TRANSPORT_INFO,
    remove_series,
)
from ssd.pool.handshake import TOO_SLOW, LinkTerms, LinkTooSlowError, shake_hands
from ssd.pool.link import DraftLink, LinkState
from ssd.pool.pool import DraftPool
from ssd.rpc.client import DraftClient
from ssd.rpc.link import HEARTBEAT_SECONDS, LEASE_SECONDS, LinkCall
from ssd.rpc.pool_codec import LinkStatus
from ssd.tasks import first_result
from ssd.types import Draining, Heartbeat, Hello, LinkSettings, SessionRefused

_log = get_logger(__name__)
RESOLVE_SECONDS = 2.0
FIRST_REDIAL_SECONDS = 0.1
MAX_REDIAL_SECONDS = 1.0
REFUSED_REDIAL_SECONDS = 10.0
FIRST_REMEASURE_SECONDS = 1.0
"""Short, because the measurement may have coincided with other work."""
MAX_REMEASURE_SECONDS = 60.0
_NO_TERMS = LinkTerms()


class LinkReport(NamedTuple):
    """The state of one address, and its link while that is up."""

    status: LinkStatus
    """Without what changes while a link is up."""
    link: DraftLink | None = None


class LinkDialer:
    """Keeps one link to each draft.

    Asyncio loop; ``reports`` may be called from any thread. One task for each address; ``run``
    ends them when it is cancelled.
    """

    def __init__(
        self,
        pool: DraftPool,
        addresses: tuple[str, ...],
        hello: Hello,
        settings: LinkSettings,
        resolver: Resolver = resolve,
        terms: LinkTerms = _NO_TERMS,
    ) -> None:
        self._pool = pool
        self._addresses = Addresses("drafts", addresses, resolver)
        self._wanted: set[str] = set()
        """The addresses to dial."""
        self._hello = hello
        self._settings = settings
        self._terms = terms
        self._epochs = itertools.count(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, LinkReport] = {}
        """The newest report of each address."""
        self._calls: set[LinkCall] = set()
        """Links that are up."""

    def reports(self) -> list[LinkReport]:
        """Return one report for each address."""
        return list(self._reports.values())

    def configure(self, settings: LinkSettings) -> None:
        """Send other settings on the links that are up, and on later ones."""
        self._settings = settings
        for call in self._calls:
            # A link that is closed or accepts no message ends by itself.
            with contextlib.suppress(LinkError):
                call.send(settings)

    async def run(self) -> None:
        """Keep links to all addresses until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._follow(group, await self._addresses.current())
                    if not self._addresses.has_names:
                        return
                    await asyncio.sleep(RESOLVE_SECONDS)
        finally:
            self._addresses.close()

    def _follow(self, group: asyncio.TaskGroup, addresses: set[str]) -> None:
        """Dial new addresses; stop dialling the others, unless their links are up."""
        self._wanted = addresses
        for address in self._tasks.keys() - addresses:
            if self._reports[address].link is None:
                self._tasks[address].cancel()
        for address in addresses - self._tasks.keys():
            self._report(LinkStatus(address=address, state=LinkState.CONNECTING))
            self._tasks[address] = group.create_task(self._keep_until_unwanted(address))

    async def _keep_until_unwanted(self, address: str) -> None:
        try:
            await self._keep(address)
        finally:
            del self._tasks[address]
            del self._reports[address]
            # The link has set its gauges for the last time.
            for gauge in (LINK_STATE, LINK_RTT_SECONDS):
                remove_series(gauge, address)

    async def _keep(self, address: str) -> None:
        """Dial an address, serve its link and dial again, as long as the address is wanted."""
        pause = FIRST_REDIAL_SECONDS
        while address in self._wanted:
            loop = asyncio.get_running_loop()
            dialled_at = loop.time()
            try:
                await self._dial(address)
            except LinkError as error:
                self._report_end(address, error)
                pause = redial_pause(error, pause, loop.time() - dialled_at)
            except Exception as error:  # noqa: BLE001 a bug here must not end the other links
                _log.exception("link_crashed", draft=address, error=repr(error))
                self._report(_lost(address, f"crashed: {error!r}"))
                pause = REFUSED_REDIAL_SECONDS
            # Targets that lost the same draft must not dial it in the same instant.
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))  # noqa: S311

    async def _dial(self, address: str) -> None:
        """Open a link and serve it until it ends.

        Raises:
            LinkError: always; the cause of the end.
        """
        client = DraftClient(address, self._terms.credentials)
        try:
            call = await client.open_link()
            try:
                raise await self._serve(address, call)
            finally:
                await call.close()
        finally:
            await client.close()

    async def _serve(self, address: str, call: LinkCall) -> LinkError:
        hello = replace(self._hello, epoch=next(self._epochs))
        link = await shake_hands(address, call, hello, self._terms)
        call.send(self._settings)
        self._calls.add(call)
        try:
            with contextlib.ExitStack() as stack:
                if self._terms.doorbell is not None:
                    call.doorbell = stack.enter_context(self._terms.doorbell(call.ring))
                    # The doorbell refers to the link.
                    stack.callback(setattr, call, "doorbell", None)
                return await self._use(link, call)
        finally:
            self._calls.discard(call)

    async def _use(self, link: DraftLink, call: LinkCall) -> LinkError:
        """Serve a link from its handshake to its end; return the cause."""
        self._pool.attach(link)
        self._report(LinkStatus(address=link.name, state=LinkState.ACTIVE), link)
        channel = link.channel
        LINK_TRANSPORT_INFO.labels(draft=link.name, transport=channel.transport).set(1)
        if channel.bytes_per_second:
            LINK_BANDWIDTH.labels(draft=link.name).set(channel.bytes_per_second)
        error = LinkError("cancelled")
        try:
            error = await first_result(
                self._receive(link, call), _send_heartbeats(link, call, self._pool)
            )
        finally:
            remove_series(LINK_TRANSPORT_INFO, link.name, channel.transport)
            if channel.bytes_per_second:
                remove_series(LINK_BANDWIDTH, link.name)
            self._pool.detach(link, str(error))
        return error

    async def _receive(self, link: DraftLink, call: LinkCall) -> LinkError:
        """Receive the draft's messages until the link ends; return the cause."""
        now = asyncio.get_running_loop().time
        try:
            while (message := await call.receive()) is not None:
                match message:
                    case bytes():
                        self._pool.receive(link, message)
                    case Heartbeat():
                        link.work_seconds = message.batch_seconds or link.work_seconds
                        if link.round_trip.receive(message, now()):
                            LINK_RTT_SECONDS.labels(draft=link.name).set(link.round_trip.seconds)
                    case SessionRefused():
                        self._pool.refuse(link, message)
                    case Draining():
                        self._pool.drain(link)
                        self._report(LinkStatus(address=link.name, state=LinkState.DRAINING), link)
                    case _:
                        pass
        except FrameError as error:
            BAD_FRAMES_TOTAL.inc()
            _log.warning("bad_frame", draft=link.name, reason=str(error))
            return error
        except LinkError as error:
            return error
        return LinkError("the draft closed the link")

    def _report_end(self, address: str, error: LinkError) -> None:
        status = _lost(address, str(error))
        match error:
            case HandshakeError():
                LINK_REFUSALS_TOTAL.labels(reason="handshake").inc()
                status = replace(status, state=LinkState.REFUSED)
            case LinkTooSlowError():
                LINK_REFUSALS_TOTAL.labels(reason=TOO_SLOW).inc()
                LINK_RTT_SECONDS.labels(draft=address).set(error.round_trip_seconds)
                status = replace(
                    status,
                    state=LinkState.REFUSED,
                    transport=error.transport,
                    round_trip_seconds=error.round_trip_seconds,
                    draft_pod=error.peer.pod,
                    draft_node=error.peer.node,
                )
        self._report(status)

    def _report(self, status: LinkStatus, link: DraftLink | None = None) -> None:
        """Replace the report of an address; log a change."""
        before = self._reports.get(status.address)
        self._reports[status.address] = LinkReport(status, link)
        LINK_STATE.labels(draft=status.address).set(status.state == LinkState.ACTIVE)
        reported = status.state, status.reason
        is_known = before is not None and (before.status.state, before.status.reason) == reported
        if status.state != LinkState.CONNECTING and not is_known:
            _log.info("link", draft=status.address, state=str(status.state), reason=status.reason)


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


def _lost(address: str, reason: str) -> LinkStatus:
    return LinkStatus(address=address, state=LinkState.LOST, reason=reason)


def redial_pause(error: LinkError, pause: float, link_seconds: float) -> float:
    """Return the seconds until an address is dialled again.

    Args:
        error: the cause of the end. The pause is long for a peer that does not fit or that broke
            the protocol, because that does not change soon.
        pause: seconds of the previous pause.
        link_seconds: seconds from the dialling to the end.
    """
    if isinstance(error, HandshakeError | FrameError):
        return REFUSED_REDIAL_SECONDS
    if isinstance(error, LinkTooSlowError):
        return min(max(2 * pause, FIRST_REMEASURE_SECONDS), MAX_REMEASURE_SECONDS)
    if link_seconds > 2 * MAX_REDIAL_SECONDS:
        return FIRST_REDIAL_SECONDS
    return min(2 * pause, MAX_REDIAL_SECONDS)
