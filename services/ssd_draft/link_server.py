"""Accepts links of targets: handshake, control messages, heartbeats, end.

Asyncio loop. A link with an invalid message is closed and counted; the other links continue.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Collection

from ssd.errors import FrameError, LinkError, OverloadedError
from ssd.observability.log import get_logger
from ssd.observability.metrics import BAD_FRAMES_TOTAL
from ssd.pool.sustainable_sessions import BatchTimes
from ssd.ports import Clock
from ssd.rpc.link import (
    HANDSHAKE_SECONDS,
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    LinkServerCall,
)
from ssd.rpc.link_codec import OpeningBounds
from ssd.runtime.step_thread import Watchdog
from ssd.speculation.table import OutcomeTable, pack_tables, unpack_commits
from ssd.tasks import first_result
from ssd.types import (
    CloseSession,
    Commit,
    DraftMessage,
    Draining,
    Heartbeat,
    Hello,
    LinkSettings,
    OpenSession,
    RefusalReason,
    SessionRefused,
    TargetMessage,
)
from ssd_draft.handshake import check_hello, check_settings, welcome
from ssd_draft.inbox import Event, Inbox, LinkChange
from ssd_draft.setup import DraftSetup

_log = get_logger(__name__)
_MIN_MESSAGE_BYTES = 64 * 1024
"""More than the commits of 256 sessions, a Hello or LinkSettings take."""
_TOKEN_BYTES = 5
"""Largest size of an encoded token id."""
_OTHER_BYTES = 1024
MAX_LINKS = 64
"""Largest number of links, including those before their Hello; see ``may_link``."""
STEP_SECONDS = 20.0
"""All links end if a step takes longer. The longest step, a batch of tables for all sessions of a
large draft on a CPU, takes a fraction of it. Shorter than
``ssd.runtime.step_thread.STUCK_SECONDS``, after which ``/livez`` fails: the end of a link costs
less than a restart, and the targets open their sessions on other drafts."""


class TargetLink:
    """The draft's end of one link after its handshake. Any thread; see ``LinkEnd``."""

    def __init__(self, number: int, hello: Hello, call: LinkServerCall, setup: DraftSetup) -> None:
        self.number = number
        self.name = hello.peer.pod or f"link {number}"
        self.settings = LinkSettings(fan_out_policy=setup.settings.fan_out)
        self.batch_times = BatchTimes()
        self._call = call
        self._lookahead = setup.settings.lookahead

    def push(self, tables: Collection[OutcomeTable]) -> None:
        """See ``LinkEnd``."""
        self.send(pack_tables(tables, self._lookahead))

    def refuse(self, session: int, reason: RefusalReason) -> None:
        """See ``LinkEnd``."""
        self.send(SessionRefused(session, str(reason)))

    def fail(self, error: LinkError) -> None:
        """See ``LinkEnd``."""
        self._call.fail(error)

    def send(self, message: DraftMessage | bytes) -> None:
        """Send a message; a link that accepts none ends."""
        try:
            self._call.send(message)
        except LinkError as error:
            self.fail(error)


class LinkServer:
    """All links of the process. Asyncio loop."""

    def __init__(self, setup: DraftSetup, inbox: Inbox, clock: Clock, watchdog: Watchdog) -> None:
        self._setup = setup
        self._inbox = inbox
        self._clock = clock
        self._watchdog = watchdog
        self._numbers = itertools.count(1)
        self._links: dict[int, TargetLink] = {}
        self._num_calls: Counter[str] = Counter()
        """Open calls by address."""
        self._is_draining = False

    @property
    def num_links(self) -> int:
        """Number of active links."""
        return len(self._links)

    @property
    def opening_bounds(self) -> OpeningBounds:
        """Largest length and number of token ids of an opening."""
        model = self._setup.model
        return OpeningBounds(model.engine.max_model_len, model.num_token_ids)

    def start_draining(self) -> None:
        """Send ``Draining`` on all links, and on each later link after its handshake."""
        self._is_draining = True
        for link in self._links.values():
            link.send(Draining())

    def close(self) -> None:
        """End all links."""
        for link in self._links.values():
            link.fail(LinkError("the draft is shutting down"))

    async def serve(self, call: LinkServerCall) -> None:
        """Serve one link until it ends.

        Raises:
            OverloadedError: there are too many links, of this address or in total.
            HandshakeError: the target does not match this draft.
            LinkError: the target sent an invalid message, no Hello or no heartbeat; or the step
                thread of this draft is stuck.
        """
        address = call.name.rpartition(":")[0]
        self._check_room(address)
        self._num_calls[address] += 1
        try:
            await self._serve(call)
        finally:
            self._num_calls[address] -= 1
            self._num_calls += Counter()  # drops addresses without a call

    def _check_room(self, address: str) -> None:
        mine, num_links = self._num_calls[address], self._num_calls.total()
        if not may_link(mine, num_links):
            raise OverloadedError(
                f"this draft has {num_links} links, {mine} of them from {address}; it accepts "
                f"{MAX_LINKS}, and from one address no more than it leaves free"
            )

    async def _serve(self, call: LinkServerCall) -> None:
        hello = await _receive_hello(call)
        if (stuck := self._stuck()) is not None:
            raise stuck
        check_hello(hello, self._setup)
        answer = welcome(hello, self._setup)
        call.send(answer)
        if answer.backend:
            # Without a collective channel, a link needs none of this.
            from ssd.transport.setup import set_up_channel  # noqa: PLC0415

            await set_up_channel(call, answer, call.name, self._setup.model.engine.device)
        link = TargetLink(next(self._numbers), hello, call, self._setup)
        self._links[link.number] = link
        self._inbox.put(Event(link, LinkChange.UP))
        if self._is_draining:
            link.send(Draining())
        _log.info("link", target=link.name, state="active", epoch=hello.epoch)
        error: LinkError | None = LinkError("the connection to the target is lost")
        try:
            error = await first_result(self._receive(link, call), self._send_heartbeats(link, call))
        finally:
            del self._links[link.number]
            self._inbox.put(Event(link, LinkChange.LOST))
            reason = str(error or "closed by the target")
            _log.info("link", target=link.name, state="ended", reason=reason)
        if error is not None:
            raise error

    async def _receive(self, link: TargetLink, call: LinkServerCall) -> LinkError | None:
        """Receive messages until the link ends; returns the reason, None if it was closed."""
        try:
            while (message := await call.receive()) is not None:
                self._handle(link, call, message)
        except FrameError as error:
            BAD_FRAMES_TOTAL.inc()
            _log.warning("bad_frame", target=link.name, reason=str(error))
            return error
        except LinkError as error:
            return error
        return None

    def _handle(
        self, link: TargetLink, call: LinkServerCall, message: TargetMessage | bytes
    ) -> None:
        match message:
            case bytes():
                self._put(Event(link, self._unpack(message), self._clock.now()))
            case OpenSession():
                if len(message.token_ids) >= self._setup.model.engine.max_model_len:
                    link.refuse(message.session, RefusalReason.LENGTH)
                elif not self._inbox.put(Event(link, message, self._clock.now())):
                    link.refuse(message.session, RefusalReason.MAX_SESSIONS)
            case CloseSession():
                self._put(Event(link, message))
            case LinkSettings():
                check_settings(message)
                link.settings = message
            case Heartbeat(nonce=nonce) if nonce:
                call.send(Heartbeat(echo=nonce))
            case Hello():
                raise FrameError("a second Hello")
            case _:
                pass

    def _unpack(self, frame: bytes) -> list[Commit]:
        settings = self._setup.settings
        return unpack_commits(
            frame,
            settings.lookahead,
            max_commits=settings.max_sessions,
            num_token_ids=self._setup.model.num_token_ids,
        )

    async def _send_heartbeats(self, link: TargetLink, call: LinkServerCall) -> LinkError | None:
        """Send heartbeats until the lease ends, the step thread is stuck or the call fails."""
        while (stuck := self._stuck()) is None:
            if call.silent_seconds > LEASE_SECONDS:
                return LinkError(f"no heartbeat for {LEASE_SECONDS} s")
            try:
                call.send(Heartbeat(batch_seconds=link.batch_times.seconds_by_sessions))
            except LinkError as error:
                return error
            await asyncio.sleep(HEARTBEAT_SECONDS)
        return stuck

    def _stuck(self) -> LinkError | None:
        """Return an error if the step thread is stuck; the loop itself still runs then."""
        seconds = self._watchdog.busy_seconds
        if seconds < STEP_SECONDS:
            return None
        return LinkError(f"the draft's step thread has not ended a step for {seconds:.1f} s")

    def _put(self, event: Event) -> None:
        if not self._inbox.put(event):
            event.link.fail(LinkError("too many messages wait for the step thread"))


def may_link(mine: int, num_links: int) -> bool:
    """Return whether an address with ``mine`` of all links may open one more.

    An address may have as many links as it leaves free. That is half of all if it is the only
    address, as with targets behind one NAT. So no address can prevent the links of another one.
    """
    return mine < MAX_LINKS - num_links


def max_message_bytes(setup: DraftSetup) -> int:
    """Return the largest size of a message from a target; the largest message is an opening.

    Decoding a message takes the event loop 20 ns per byte.
    """
    return max(_MIN_MESSAGE_BYTES, _OTHER_BYTES + _TOKEN_BYTES * setup.model.engine.max_model_len)


async def _receive_hello(call: LinkServerCall) -> Hello:
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            message = await call.receive()
    except TimeoutError as error:
        raise LinkError(f"no Hello within {HANDSHAKE_SECONDS} s") from error
    if not isinstance(message, Hello):
        raise FrameError("the first message of a link must be Hello")
    return message
