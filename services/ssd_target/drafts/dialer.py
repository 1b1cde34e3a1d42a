"""Keeping links to drafts up: dial, shake hands, beat, notice the end, dial again. Asyncio loop.

One task an address. A lost link is dialled again within a second, so that speed is back within
seconds; one that was refused, or whose draft broke the rules, every ten, one that measured worse
than required after a pause that grows.
A DNS name is resolved every two seconds: addresses that appear are dialled; those that go are not
dialled again, but a link that is up serves until it ends, since a draft loses its name whenever its
probe fails once and says itself when it leaves for good. A name server that does not answer changes
nothing.
"""

import asyncio
import ipaddress
import itertools
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.rpc.client import DraftClient
from ssd.rpc.link import (
    HANDSHAKE_SECONDS,
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    LinkCall,
    LinkFrames,
    as_link_error,
    first_result,
)
from ssd.rpc.server import join_address
from ssd.speculation.table import row_width
from ssd.telemetry import (
    BAD_FRAMES_TOTAL,
    LINK_REFUSALS_TOTAL,
    LINK_RTT_SECONDS,
    LINK_STATE,
    LINK_TRANSPORT_INFO,
    get_logger,
)
from ssd.threads import in_daemon_thread
from ssd.transport.channels import CHANNELS
from ssd.transport.frame import Frame, FrameLimits
from ssd.types import Draining, Heartbeat, LinkHello, LinkPolicy, LinkWelcome, Peer, SessionRefusal
from ssd_target.drafts.link import DraftLink, LinkState
from ssd_target.drafts.link_quality import (
    TOO_SLOW,
    LinkQuality,
    LinkRequirement,
    LinkTooSlowError,
    measure,
)
from ssd_target.drafts.pool import DraftPool
from ssd_target.settings import DNS_SCHEME

_log = get_logger(__name__)
_NOBODY = Peer()
_ANY_LINK = LinkRequirement()
RESOLVE_SECONDS = 2.0
LONGEST_RESOLVE_SECONDS = 5.0
"""A name server that has not answered by then is taken for one that does not answer."""
MAX_DRAFT_SESSIONS = 256
"""Sessions that a draft may offer: what it offers bounds the frames that are taken from it. The
most that a draft's ``max_sessions`` can be."""
FIRST_REDIAL_SECONDS = 0.1
LONGEST_REDIAL_SECONDS = 1.0
REFUSED_REDIAL_SECONDS = 10.0
FIRST_REMEASURE_SECONDS = 1.0
"""A link that measured too slow may have met a busy moment."""
LONGEST_REMEASURE_SECONDS = 60.0

Resolver = Callable[[str, int], Awaitable[set[str]]]
"""Host and port to the addresses behind them; raises ``OSError`` where there is no answer."""


async def resolve(host: str, port: int) -> set[str]:
    """Ask the system's resolver; a name without addresses, or that does not exist, has none.

    Raises:
        OSError: nobody answers for the name.
    """
    try:
        answers = await in_daemon_thread(
            partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        )
    except socket.gaierror as error:
        # What Kubernetes says of a Service with no pod that is ready.
        if error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}:
            return set()
        raise
    return {join_address(str(answer[4][0]), int(answer[4][1])) for answer in answers}


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What is known of an address, for those who ask."""

    address: str
    state: LinkState
    reason: str = ""
    link: DraftLink | None = None
    found: LinkQuality | None = None
    """What was measured before the link was refused."""
    peer: Peer = _NOBODY
    """The draft, where it has said its name before the link was refused."""


class LinkDialer:
    """Holds one link to each draft. ``run`` until cancelled."""

    def __init__(
        self,
        pool: DraftPool,
        addresses: tuple[str, ...],
        hello: LinkHello,
        policy: LinkPolicy,
        resolver: Resolver = resolve,
        *,
        requirement: LinkRequirement = _ANY_LINK,
    ) -> None:
        self._pool = pool
        self._resolver = resolver
        self._literal = {address for address in addresses if is_literal(address)}
        names = [address for address in addresses if not is_literal(address)]
        self._names = [name.removeprefix(DNS_SCHEME) for name in names]
        self._wanted: set[str] = set()
        """Addresses to dial: all literal ones, and those in the newest answers."""
        self._answers: dict[str, set[str]] = {}
        self._asked: dict[str, asyncio.Future[set[str]]] = {}
        """Questions without an answer so far: none is asked twice at a time."""
        self._hello = hello
        self._policy = policy
        self._requirement = requirement
        self._epochs = itertools.count(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, LinkReport] = {}

    def reports(self) -> list[LinkReport]:
        """One entry an address."""
        return list(self._reports.values())

    async def run(self) -> None:
        """Keep links to all addresses until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._follow(group, self._literal | await self._resolve())
                    if not self._names:
                        return
                    await asyncio.sleep(RESOLVE_SECONDS)
        finally:
            for question in self._asked.values():
                question.cancel()

    async def _resolve(self) -> set[str]:
        for name in self._names:
            host, _, port = name.rpartition(":")
            if name not in self._asked:
                self._asked[name] = asyncio.ensure_future(self._resolver(host, int(port)))
            try:
                async with asyncio.timeout(LONGEST_RESOLVE_SECONDS):
                    answer = await asyncio.shield(self._asked[name])
            except (OSError, UnicodeError) as error:
                if self._asked[name].done():
                    del self._asked[name]
                _log.info("drafts_not_resolved", name=name, reason=str(error) or "no answer")
                continue
            del self._asked[name]
            if answer != self._answers.get(name):
                _log.info("drafts_resolved", name=name, addresses=len(answer))
            self._answers[name] = answer
        return set().union(*self._answers.values())

    def _follow(self, group: asyncio.TaskGroup, addresses: set[str]) -> None:
        self._wanted = addresses
        for address in self._tasks.keys() - addresses:
            if self._reports[address].link is None:
                self._tasks[address].cancel()
        for address in addresses - self._tasks.keys():
            self._report(LinkReport(address, LinkState.CONNECTING))
            self._tasks[address] = group.create_task(self._keep_up_and_forget(address))

    async def _keep_up_and_forget(self, address: str) -> None:
        try:
            await self._keep_up(address)
        finally:
            del self._tasks[address]
            del self._reports[address]
            # Only now has the last beat of the link set its gauges.
            for gauge in (LINK_STATE, LINK_RTT_SECONDS):
                with suppress(KeyError):
                    gauge.remove(address)

    async def _keep_up(self, address: str) -> None:
        """Hold a link to one address, as long as it is wanted."""
        pause = FIRST_REDIAL_SECONDS
        while address in self._wanted:
            loop = asyncio.get_running_loop()
            dialled_at = loop.time()
            try:
                await self._hold(address)
            except HandshakeError as error:
                LINK_REFUSALS_TOTAL.labels(reason="handshake").inc()
                self._report(LinkReport(address, LinkState.REFUSED, str(error)))
                pause = redial_pause(error, pause, 0.0)
            except LinkTooSlowError as error:
                self._report_too_slow(address, error)
                pause = redial_pause(error, pause, 0.0)
            except LinkError as error:
                self._report(LinkReport(address, LinkState.LOST, str(error)))
                pause = redial_pause(error, pause, loop.time() - dialled_at)
            except Exception as error:  # noqa: BLE001 a bug here must not cost the other links
                _log.exception("link_crashed", draft=address, error=repr(error))
                self._report(LinkReport(address, LinkState.LOST, f"crashed: {error!r}"))
                pause = REFUSED_REDIAL_SECONDS
            # Spread out: targets that lost the same draft do not come back in one instant.
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))  # noqa: S311

    async def _hold(self, address: str) -> None:
        """Dial, shake hands and keep the link until it ends, which is always a ``LinkError``."""
        client = DraftClient(address)
        try:
            call = await client.open_link()
            try:
                await self._serve(address, call)
            finally:
                await call.close()
        finally:
            await client.close()

    async def _serve(self, address: str, call: LinkCall) -> None:
        hello = replace(self._hello, epoch=next(self._epochs))
        call.send(hello)
        welcome = await _first_answer(call)
        check_welcome(hello, welcome)
        channel = CHANNELS[hello.channel](LinkFrames(call), frame_limits(welcome))
        if not self._requirement.asks_nothing:
            seconds = await measure(call, asyncio.get_running_loop().time)
            found = LinkQuality(transport=channel.transport, round_trip_seconds=seconds)
            self._requirement.check(found, welcome.peer)
        link = DraftLink(
            address, hello.epoch, welcome.max_sessions, channel, call.send, peer=welcome.peer
        )
        link.max_len = welcome.max_len
        ended: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
        channel.start(
            lambda frame: self._on_frame(link, frame, ended),
            lambda error: _end(ended, as_link_error(error)),
        )
        call.send(self._policy)
        self._pool.attach(link)
        self._report(LinkReport(address, LinkState.ACTIVE, link=link))
        LINK_TRANSPORT_INFO.labels(draft=address, transport=link.transport).set(1)
        error = LinkError("cancelled")
        try:
            error = await first_result(ended, self._listen(link, call), self._beat(link, call))
        finally:
            LINK_TRANSPORT_INFO.remove(address, link.transport)
            self._pool.detach(link, str(error))
            link.close()
        raise error

    async def _listen(self, link: DraftLink, call: LinkCall) -> LinkError:
        """Take the draft's messages until the link ends; returns why it did."""
        while True:
            try:
                async with asyncio.timeout(LEASE_SECONDS):
                    message = await call.receive()
            except TimeoutError:
                return LinkError(f"no sign of life for {LEASE_SECONDS} s")
            except LinkError as error:
                return error
            if message is None:
                return LinkError("the draft closed the link")
            if isinstance(message, Heartbeat):
                self._note_beat(link, message)
            elif isinstance(message, SessionRefusal):
                self._pool.refuse(link, message)
            elif isinstance(message, Draining):
                self._pool.drain(link)
                self._report(LinkReport(link.name, LinkState.DRAINING, link=link))

    async def _beat(self, link: DraftLink, call: LinkCall) -> LinkError:
        """Give signs of life until the link is lost; returns why it was."""
        now = asyncio.get_running_loop().time
        while link.lost_because is None:
            try:
                call.send(link.round_trip.beat(now()))
            except LinkError as error:
                return error
            is_active = self._pool.state(link) is LinkState.ACTIVE
            LINK_STATE.labels(draft=link.name).set(is_active)
            await asyncio.sleep(HEARTBEAT_SECONDS)
        return LinkError(link.lost_because)

    def _note_beat(self, link: DraftLink, beat: Heartbeat) -> None:
        if link.round_trip.hear(beat, asyncio.get_running_loop().time()):
            LINK_RTT_SECONDS.labels(draft=link.name).set(link.round_trip.seconds)

    def _on_frame(self, link: DraftLink, frame: Frame, ended: "asyncio.Future[LinkError]") -> None:
        if ended.done():
            return
        try:
            self._pool.receive(link, frame)
        except FrameError as error:
            BAD_FRAMES_TOTAL.inc()
            _log.warning("bad_frame", draft=link.name, reason=str(error))
            _end(ended, error)

    def _report_too_slow(self, address: str, error: LinkTooSlowError) -> None:
        LINK_REFUSALS_TOTAL.labels(reason=TOO_SLOW).inc()
        LINK_RTT_SECONDS.labels(draft=address).set(error.found.round_trip_seconds)
        self._report(
            LinkReport(address, LinkState.REFUSED, str(error), found=error.found, peer=error.peer)
        )

    def _report(self, report: LinkReport) -> None:
        previous = self._reports.get(report.address)
        self._reports[report.address] = report
        LINK_STATE.labels(draft=report.address).set(report.state is LinkState.ACTIVE)
        is_news = previous is None or (previous.state, previous.reason) != (
            report.state,
            report.reason,
        )
        if is_news and report.state is not LinkState.CONNECTING:
            _log.info("link", draft=report.address, state=str(report.state), reason=report.reason)


def redial_pause(error: LinkError, pause: float, lived_seconds: float) -> float:
    """Seconds until an address is dialled again.

    Args:
        error: how the link ended. What will not change soon, a peer that does not fit or that broke
            the rules, is tried seldom.
        pause: seconds of the pause before.
        lived_seconds: from the dialling to the end.
    """
    if isinstance(error, HandshakeError | FrameError):
        return REFUSED_REDIAL_SECONDS
    if isinstance(error, LinkTooSlowError):
        return min(max(2 * pause, FIRST_REMEASURE_SECONDS), LONGEST_REMEASURE_SECONDS)
    if lived_seconds > 2 * LONGEST_REDIAL_SECONDS:
        return FIRST_REDIAL_SECONDS
    return min(2 * pause, LONGEST_REDIAL_SECONDS)


def is_literal(address: str) -> bool:
    """Whether an address names one endpoint: a number or ``localhost``, not a DNS name."""
    if address.startswith(DNS_SCHEME):
        return False
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_welcome(hello: LinkHello, welcome: LinkWelcome) -> None:
    """Hold a draft to what was proposed.

    Raises:
        HandshakeError: it agreed to something else.
    """
    if welcome.max_sessions > MAX_DRAFT_SESSIONS:
        raise HandshakeError(
            "max_sessions",
            f"the draft reports {welcome.max_sessions}, at most {MAX_DRAFT_SESSIONS}",
        )
    for name in ("epoch", "lookahead", "branches"):
        mine, theirs = getattr(hello, name), getattr(welcome, name)
        if mine != theirs:
            raise HandshakeError(name, f"this target has {mine}, the draft answered {theirs}")


def frame_limits(welcome: LinkWelcome) -> FrameLimits:
    """Tables of all sessions in one frame; no honest frame has more rows."""
    return FrameLimits(
        max_rows=max(1, welcome.max_sessions) * (welcome.branches + 1),
        max_width=row_width(welcome.lookahead),
    )


async def _first_answer(call: LinkCall) -> LinkWelcome:
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            message = await call.receive()
    except TimeoutError as error:
        raise LinkError(f"no Welcome within {HANDSHAKE_SECONDS} s") from error
    if not isinstance(message, LinkWelcome):
        raise LinkError("the draft closed the link, or spoke before its Welcome")
    return message


def _end(ended: "asyncio.Future[LinkError]", error: LinkError) -> None:
    if not ended.done():
        ended.set_result(error)
