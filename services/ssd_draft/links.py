"""The draft's ends of its links: shake hands, hear the target out, beat, notice the end.

Asyncio loop. A link that breaks the rules is closed and counted; the other links serve on.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ssd.errors import FrameError, HandshakeError, LinkError, OverloadedError, SettingsError
from ssd.ports import Clock
from ssd.rpc.link import (
    HANDSHAKE_SECONDS,
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    LinkFrames,
    LinkServerCall,
    as_link_error,
    first_result,
)
from ssd.speculation.fan_out import make_policy
from ssd.speculation.table import OutcomeTable, pack_tables, row_width, unpack_commits
from ssd.telemetry import BAD_FRAMES_TOTAL, STALE_FRAMES_TOTAL, get_logger
from ssd.threads import post
from ssd.transport.channels import CHANNELS
from ssd.transport.frame import Frame, FrameKind, FrameLimits
from ssd.types import (
    WIRE_VERSION,
    Branch,
    Commit,
    Draining,
    Heartbeat,
    LinkHello,
    LinkPolicy,
    LinkWelcome,
    Peer,
    SessionClosing,
    SessionOpening,
    SessionRefusal,
)
from ssd_draft.inbox import Closing, Commits, Event, Inbox, LinkLost, LinkUp, Opening
from ssd_draft.sessions import Refusal

_log = get_logger(__name__)
_SHOWN_CHARACTERS = 12
_CURES = dict.fromkeys(
    ("vocab_size", "tokenizer_fingerprint"), "; take a draft of the target's family"
)
"""What to do about a field that differs, where the values do not tell."""
_LEAST_MESSAGE_BYTES = 64 * 1024
"""The commits of 256 sessions, and what greetings may hold, take less."""
_TOKEN_BYTES = 5
"""Of a token id at most."""
_OTHER_BYTES = 1024
MAX_LINKS = 64
"""Links at a time, those without a Hello among them; see ``may_link``."""
STUCK_SECONDS = 20.0
"""A step thread that leaves its inbox alone for this long is stuck: the longest step, a batch of
tables for all sessions of a large draft on a CPU, takes a fraction of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """What this draft holds every target to."""

    vocab_size: int
    """Token ids that both the tokenizer and the embedding have."""
    tokenizer_fingerprint: str
    lookahead: int
    branches: int
    capacity: int
    max_len: int
    """Tokens of a session at most; longer openings are refused before they are queued."""
    delay_seconds: float = 0.0
    """Fault injection: each table leaves that much later."""
    default_policy: LinkPolicy = field(default_factory=LinkPolicy)
    peer: Peer = field(default_factory=Peer)

    @property
    def max_message_bytes(self) -> int:
        """Of a message of a target; the longest is an opening.

        Reading one takes the event loop 20 ns a byte.
        """
        return max(_LEAST_MESSAGE_BYTES, _OTHER_BYTES + _TOKEN_BYTES * self.max_len)

    @property
    def frame_limits(self) -> FrameLimits:
        """Tables of all sessions in one frame; no honest frame has more rows."""
        return FrameLimits(
            max_rows=self.capacity * (self.branches + 1), max_width=row_width(self.lookahead)
        )


class TargetLink:
    """One link after its handshake. ``push``, ``refuse`` and ``fail`` from any thread.

    ``ended`` holds why the link is over; None is the target's goodbye.
    """

    def __init__(
        self, number: int, hello: LinkHello, call: LinkServerCall, terms: LinkTerms
    ) -> None:
        self.number = number
        self.epoch = hello.epoch
        self.name = hello.peer.pod or f"link {number}"
        self.policy = terms.default_policy
        self._call = call
        self._terms = terms
        self._channel = CHANNELS[hello.channel](LinkFrames(call), terms.frame_limits)
        self._loop = asyncio.get_running_loop()
        self._sequence_numbers = itertools.count(1)
        self._newest_heard = 0
        self.ended: asyncio.Future[LinkError | None] = self._loop.create_future()

    def start(self, on_commits: Callable[[list[Commit]], None]) -> None:
        """Deliver commits, checked, on the loop's thread."""
        self._channel.start(
            lambda frame: self._on_frame(frame, on_commits),
            lambda error: self.end(as_link_error(error)),
        )

    def push(self, tables: Collection[OutcomeTable]) -> None:
        """Send tables in one frame, now or after the injected delay."""
        rows_RW = pack_tables(list(tables), row_width(self._terms.lookahead))
        frame = Frame(FrameKind.TABLES, self.epoch, next(self._sequence_numbers), rows_RW)
        if self._terms.delay_seconds:
            delay = self._terms.delay_seconds
            post(self._loop, self._loop.call_later, delay, self._send, frame)
        else:
            self._send(frame)

    def refuse(self, session: int, reason: Refusal) -> None:
        """Tell the target that a session is not kept."""
        try:
            self._call.send(SessionRefusal(session, str(reason)))
        except LinkError as error:
            self.fail(error)

    def fail(self, error: LinkError) -> None:
        """End the link because of an error."""
        post(self._loop, self.end, error)

    def end(self, error: LinkError) -> None:
        """End the link; the first reason counts. Loop's thread only."""
        if not self.ended.done():
            self.ended.set_result(error)

    def send_draining(self) -> None:
        """Tell the target to open no more sessions here."""
        try:
            self._call.send(Draining())
        except LinkError as error:
            self.end(error)

    def close(self) -> None:
        """Close the channel; idempotent."""
        self._channel.close()

    def _send(self, frame: Frame) -> None:
        try:
            self._channel.send(frame)
        except LinkError as error:
            self.fail(error)

    def _on_frame(self, frame: Frame, on_commits: Callable[[list[Commit]], None]) -> None:
        if self.ended.done():
            return
        if frame.epoch != self.epoch or frame.sequence_number <= self._newest_heard:
            STALE_FRAMES_TOTAL.inc()
            return
        self._newest_heard = frame.sequence_number
        try:
            if frame.kind is not FrameKind.COMMITS:
                raise FrameError(f"a target sent a frame of kind {frame.kind.name}")
            if len(frame.rows_RW) > self._terms.capacity:
                raise FrameError(
                    f"a frame has {len(frame.rows_RW)} commits, this draft keeps "
                    f"{self._terms.capacity} sessions"
                )
            commits = unpack_commits(frame.rows_RW, self._terms.lookahead)
            for commit in commits:
                check_commit(commit, self._terms.vocab_size)
        except FrameError as error:
            BAD_FRAMES_TOTAL.inc()
            _log.warning("bad_frame", target=self.name, reason=str(error))
            self.end(error)
            return
        on_commits(commits)


class LinkServer:
    """All links of the process. Asyncio loop."""

    def __init__(self, terms: LinkTerms, inbox: Inbox, clock: Clock) -> None:
        self._terms = terms
        self._inbox = inbox
        self._clock = clock
        self._numbers = itertools.count(1)
        self._links: dict[int, TargetLink] = {}
        self._num_calls: Counter[str] = Counter()
        """Calls that are held, by address."""
        self._is_draining = False

    @property
    def num_links(self) -> int:
        """Links up now."""
        return len(self._links)

    def start_draining(self) -> None:
        """Tell every target, also those who come later."""
        self._is_draining = True
        for link in self._links.values():
            link.send_draining()

    def close(self) -> None:
        """End all links."""
        for link in self._links.values():
            link.end(LinkError("the draft is leaving"))

    @property
    def max_opening_tokens(self) -> int:
        """Token ids of an opening that are looked at; one as long as that is refused."""
        return self._terms.max_len

    async def serve(self, call: LinkServerCall) -> None:
        """Hold one link until it ends.

        Raises:
            OverloadedError: there are too many links, of this address or in all.
            HandshakeError: the target does not fit this draft.
            LinkError: the peer broke the rules, fell silent or did not say Hello; or nobody here
                works any more.
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
                f"this draft has {num_links} links, {mine} of them from {address}; it takes "
                f"{MAX_LINKS}, and from one address no more than it leaves free"
            )

    async def _serve(self, call: LinkServerCall) -> None:
        hello = await _first_message(call)
        if (stuck := self._stuck()) is not None:
            raise stuck
        check_hello(hello, self._terms)
        link = TargetLink(next(self._numbers), hello, call, self._terms)
        call.send(welcome(hello, self._terms))
        link.start(lambda commits: self._put(link, Commits(link, commits, self._clock.now())))
        self._links[link.number] = link
        self._inbox.put(LinkUp(link))
        if self._is_draining:
            link.send_draining()
        _log.info("link", target=link.name, state="active", epoch=link.epoch)
        error: LinkError | None = LinkError("the target vanished")
        try:
            error = await first_result(link.ended, self._listen(link, call), self._beat(call))
        finally:
            del self._links[link.number]
            self._inbox.put(LinkLost(link))
            link.close()
            _log.info("link", target=link.name, state="ended", reason=str(error or "goodbye"))
        if error is not None:
            raise error

    async def _listen(self, link: TargetLink, call: LinkServerCall) -> LinkError | None:
        """Hear the target out; returns why it is over."""
        while True:
            try:
                async with asyncio.timeout(LEASE_SECONDS):
                    message = await call.receive()
                match message:
                    case None:
                        return None
                    case SessionOpening():
                        self._open(link, message)
                    case SessionClosing():
                        self._put(link, Closing(link, message.session))
                    case LinkPolicy():
                        check_policy(message, self._terms)
                        link.policy = message
                    case Heartbeat(nonce=nonce) if nonce:
                        call.send(Heartbeat(echo=nonce))
                    case LinkHello():
                        return FrameError("a second Hello")
                    case _:
                        pass
            except TimeoutError:
                return LinkError(f"no sign of life for {LEASE_SECONDS} s")
            except LinkError as error:
                return error

    async def _beat(self, call: LinkServerCall) -> LinkError | None:
        """Give signs of life while the step thread does; returns why that is over."""
        while (stuck := self._stuck()) is None:
            try:
                call.send(Heartbeat())
            except LinkError as error:
                return error
            await asyncio.sleep(HEARTBEAT_SECONDS)
        return stuck

    def _stuck(self) -> LinkError | None:
        """Why targets should look elsewhere: beats of a loop say nothing of the step thread."""
        seconds = self._inbox.waiting_seconds(self._clock.now())
        if seconds < STUCK_SECONDS:
            return None
        return LinkError(f"the draft's step thread has taken nothing for {seconds:.1f} s")

    def _open(self, link: TargetLink, opening: SessionOpening) -> None:
        """Queue an opening; one that finds no room in the inbox finds none in the draft either."""
        check_opening(opening, self._terms.vocab_size)
        if len(opening.token_ids) >= self._terms.max_len:
            link.refuse(opening.session, Refusal.LENGTH)
        elif not self._inbox.put(Opening(link, opening, self._clock.now())):
            link.refuse(opening.session, Refusal.MAX_SESSIONS)

    def _put(self, link: TargetLink, event: Event) -> None:
        if not self._inbox.put(event):
            link.end(LinkError("too many messages wait for the step thread"))


def may_link(mine: int, num_links: int) -> bool:
    """Whether an address with so many of all links may have one more.

    An address may hold as many links as it leaves free: half of all where it is the only one, as
    with targets behind one NAT. So no address, whatever it dials, keeps another one out.
    """
    return mine < MAX_LINKS - num_links


def welcome(hello: LinkHello, terms: LinkTerms) -> LinkWelcome:
    """The answer to a Hello that fits."""
    return LinkWelcome(
        epoch=hello.epoch,
        max_sessions=terms.capacity,
        lookahead=terms.lookahead,
        branches=terms.branches,
        peer=terms.peer,
        max_len=terms.max_len,
    )


def check_hello(hello: LinkHello, terms: LinkTerms) -> None:
    """Hold a target to what this draft can do.

    Raises:
        HandshakeError: names the first field that differs.
    """
    mine = {
        "wire_version": WIRE_VERSION,
        "vocab_size": terms.vocab_size,
        "tokenizer_fingerprint": terms.tokenizer_fingerprint,
        "lookahead": terms.lookahead,
        "branches": terms.branches,
    }
    for name, value in mine.items():
        theirs = getattr(hello, name)
        if theirs != value:
            raise HandshakeError(
                name,
                f"this draft has {_short(value)}, the target said {_short(theirs)}"
                + _CURES.get(name, ""),
            )
    if hello.channel not in CHANNELS:
        known = ", ".join(CHANNELS)
        raise HandshakeError("channel", f"this draft has {known}, the target said {hello.channel}")


def _short(value: object) -> str:
    """A value in a message; of a fingerprint its beginning tells enough."""
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def check_policy(policy: LinkPolicy, terms: LinkTerms) -> None:
    """Refuse a policy that cannot be followed.

    Raises:
        HandshakeError: it is unknown, or its split does not fit the table.
    """
    try:
        make_policy(policy.fan_out_policy, policy.fan_out)
    except SettingsError as error:
        raise HandshakeError("fan_out_policy", str(error)) from error
    if policy.fan_out and (len(policy.fan_out), sum(policy.fan_out)) != (
        terms.lookahead + 1,
        terms.branches,
    ):
        raise HandshakeError(
            "fan_out",
            f"has {len(policy.fan_out)} lengths and {sum(policy.fan_out)} branches, this draft "
            f"has {terms.lookahead + 1} and {terms.branches}",
        )


def check_opening(opening: SessionOpening, vocab_size: int) -> None:
    """Refuse what would make the model fail.

    Raises:
        FrameError: no tokens, ids outside the vocabulary, or numbers out of range.
    """
    ids = opening.token_ids
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise FrameError(f"an opening needs token ids of 0..{vocab_size - 1}, one at least")
    if not 0.0 <= opening.temperature <= 2.0:
        raise FrameError(f"temperature {opening.temperature} of an opening is not in 0..2")


def check_commit(commit: Commit, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        FrameError: there is one.
    """
    proposed = () if isinstance(commit.next, Branch) else commit.next.tokens
    highest = max((commit.outcome.bonus, *proposed))
    if highest >= vocab_size:
        raise FrameError(f"a commit holds token id {highest}, the vocabulary has {vocab_size}")


async def _first_message(call: LinkServerCall) -> LinkHello:
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            message = await call.receive()
    except TimeoutError as error:
        raise LinkError(f"no Hello within {HANDSHAKE_SECONDS} s") from error
    if not isinstance(message, LinkHello):
        raise FrameError("the first message of a link must be Hello")
    return message
