"""Opens one link to each draft, and opens it again when it ends.

A lost link is dialled again within a second. A link that was refused, or whose draft broke the
protocol, is dialled again after 10 s. The pause grows for a link whose round trip is too long. DNS
names are resolved every 2 s. New addresses are dialled. Addresses that disappear are not dialled
again, but a link that is up stays: a draft loses its address whenever its readiness probe fails
once, and it sends ``Draining`` when it leaves for good.
"""

import asyncio
import contextlib
import itertools
import random
from dataclasses import replace

from ssd.addresses import Addresses, Resolver, resolve
from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.observability.log import get_logger
from ssd.observability.metrics import LINK_REFUSALS_TOTAL, LINK_RTT_SECONDS
from ssd.pool.connection import serve
from ssd.pool.handshake import LinkTerms, shake_hands
from ssd.pool.link import LinkState
from ssd.pool.link_quality import TOO_SLOW, LinkTooSlowError
from ssd.pool.pool import DraftPool
from ssd.pool.reports import LinkReport, LinkReports
from ssd.rpc.client import DraftClient
from ssd.rpc.link import LinkCall
from ssd.types import Hello, LinkSettings

_log = get_logger(__name__)
RESOLVE_SECONDS = 2.0
FIRST_REDIAL_SECONDS = 0.1
MAX_REDIAL_SECONDS = 1.0
REFUSED_REDIAL_SECONDS = 10.0
FIRST_REMEASURE_SECONDS = 1.0
"""Short, because the measurement may have coincided with other work."""
MAX_REMEASURE_SECONDS = 60.0
_NO_TERMS = LinkTerms()


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
        self._reports = LinkReports()
        self._calls: set[LinkCall] = set()
        """Links that are up."""

    def reports(self) -> list[LinkReport]:
        """Return one report for each address."""
        return self._reports.all()

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
            if self._reports.link(address) is None:
                self._tasks[address].cancel()
        for address in addresses - self._tasks.keys():
            self._reports.set(LinkReport(address, LinkState.CONNECTING))
            self._tasks[address] = group.create_task(self._keep_until_unwanted(address))

    async def _keep_until_unwanted(self, address: str) -> None:
        try:
            await self._keep(address)
        finally:
            del self._tasks[address]
            # The link has set its gauges for the last time.
            self._reports.remove(address)

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
                self._reports.set(LinkReport(address, LinkState.LOST, f"crashed: {error!r}"))
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
                return await serve(link, call, self._pool, self._reports)
        finally:
            self._calls.discard(call)

    def _report_end(self, address: str, error: LinkError) -> None:
        match error:
            case HandshakeError():
                LINK_REFUSALS_TOTAL.labels(reason="handshake").inc()
                report = LinkReport(address, LinkState.REFUSED, str(error))
            case LinkTooSlowError():
                LINK_REFUSALS_TOTAL.labels(reason=TOO_SLOW).inc()
                LINK_RTT_SECONDS.labels(draft=address).set(error.round_trip_seconds)
                report = LinkReport(
                    address,
                    LinkState.REFUSED,
                    str(error),
                    transport=error.transport,
                    round_trip_seconds=error.round_trip_seconds,
                    peer=error.peer,
                )
            case _:
                report = LinkReport(address, LinkState.LOST, str(error))
        self._reports.set(report)


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
