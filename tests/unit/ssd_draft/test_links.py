"""The draft's end of a link, over real gRPC, with nobody at work behind the inbox."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.rpc.client import DraftClient
from ssd.rpc.link import LinkCall, LinkFrames
from ssd.rpc.link_codec import speculate_request
from ssd.rpc.pool_codec import DraftStatus
from ssd.rpc.server import RpcServer
from ssd.speculation.table import pack_commits
from ssd.telemetry import BAD_FRAMES_TOTAL
from ssd.testing.clock import FakeClock
from ssd.transport.frame import Frame, FrameKind
from ssd.transport.grpc_channel import GrpcChannel
from ssd.types import (
    WIRE_VERSION,
    Commit,
    Explicit,
    Heartbeat,
    LinkHello,
    LinkPolicy,
    LinkWelcome,
    Outcome,
    SessionClosing,
    SessionOpening,
    SessionRefusal,
    TargetMessage,
)
from ssd_draft import links
from ssd_draft.inbox import Inbox, LinkLost, LinkUp
from ssd_draft.links import STUCK_SECONDS, LinkServer, LinkTerms, TargetLink
from ssd_draft.servicer import SpeculationServicer
from ssd_draft.sessions import Refusal

TERMS = LinkTerms(
    vocab_size=10, tokenizer_fingerprint="f", lookahead=6, branches=24, capacity=4, max_len=20
)
HELLO = LinkHello(
    wire_version=WIRE_VERSION,
    vocab_size=10,
    tokenizer_fingerprint="f",
    lookahead=6,
    branches=24,
    channel="grpc",
    epoch=3,
)


@dataclass
class Desk:
    """A draft's end with a clock that is moved by hand."""

    clock: FakeClock
    inbox: Inbox
    client: DraftClient

    @contextlib.asynccontextmanager
    async def dialled(self, hello: LinkHello = HELLO) -> AsyncIterator[LinkCall]:
        """A link that has said Hello."""
        call = await self.client.open_link()
        try:
            call.send(hello)
            yield call
        finally:
            await call.close()

    @contextlib.asynccontextmanager
    async def linked(self) -> AsyncIterator[LinkCall]:
        """A link that was welcomed."""
        async with self.dialled() as call:
            assert isinstance(await call.receive(), LinkWelcome)
            yield call


def no_status() -> DraftStatus:
    raise AssertionError


def no_drain(_seconds: float) -> int:
    raise AssertionError


async def hear_out(call: LinkCall) -> None:
    while await call.receive() is not None:
        pass


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    clock = FakeClock()
    inbox = Inbox(100, 1 << 20, clock)
    server = RpcServer("127.0.0.1", 0)
    SpeculationServicer(
        LinkServer(TERMS, inbox, clock), is_ready=lambda: True, status=no_status, drain=no_drain
    ).add_to(server)
    await server.start()
    client = DraftClient(f"127.0.0.1:{server.port}")
    try:
        yield Desk(clock, inbox, client)
    finally:
        await client.close()
        await server.stop(0.0)


async def test_the_step_thread_learns_of_a_link_before_anything_it_says(desk: Desk) -> None:
    async with desk.linked() as call:
        call.send(SessionClosing(1))
        call.send(Heartbeat(nonce=1))
        while await call.receive() != Heartbeat(echo=1):
            pass
        heard = [type(event).__name__ for event in desk.inbox.drain()]
    assert heard == ["LinkUp", "Closing"]


async def test_a_step_thread_that_takes_nothing_loses_the_links_and_gets_no_new_ones(
    desk: Desk,
) -> None:
    async with desk.linked() as call:
        desk.clock.advance(STUCK_SECONDS)
        with pytest.raises(LinkError, match=r"taken nothing for 20\.0 s"):
            await hear_out(call)
    async with desk.dialled() as call:
        with pytest.raises(LinkError, match="taken nothing"):
            await call.receive()
    desk.inbox.drain()
    async with desk.linked():
        pass


async def test_a_step_thread_with_nothing_to_do_may_rest_for_ever(desk: Desk) -> None:
    async with desk.linked() as call:
        desk.inbox.drain()
        desk.clock.advance(1000 * STUCK_SECONDS)
        call.send(Heartbeat(nonce=1))
        beats = 0
        while beats < 3:
            assert await call.receive() is not None
            beats += 1


@pytest.mark.parametrize(
    "kind", [FrameKind.COMMITS, FrameKind.TABLES], ids=["rows of nonsense", "the drafts own kind"]
)
async def test_a_bad_frame_ends_its_link_and_is_counted_once(desk: Desk, kind: FrameKind) -> None:
    before = BAD_FRAMES_TOTAL._value.get()
    async with desk.linked() as call:
        rows_RW = np.full((1, 12), -7, dtype=np.int32)
        for number in range(1, 20):
            GrpcChannel(LinkFrames(call)).send(Frame(kind, HELLO.epoch, number, rows_RW))
        with pytest.raises(LinkError):
            await hear_out(call)
    assert BAD_FRAMES_TOTAL._value.get() == before + 1


async def test_a_channel_that_is_not_here_is_refused_by_name(desk: Desk) -> None:
    async with desk.dialled(replace(HELLO, channel="pigeon")) as call:
        with pytest.raises(HandshakeError, match=r"channel: this draft has grpc, .* pigeon"):
            await call.receive()
    assert not any(isinstance(event, LinkUp | LinkLost) for event in desk.inbox.drain())


class SilentCall:
    """A link that takes everything and starts nothing."""

    def send(self, message: object) -> None:
        raise LinkError("the link is closed")

    def receive_frames(self, on_payload: object, on_lost: object) -> None: ...


@pytest.mark.parametrize("delay_seconds", [0.0, 1.0])
def test_what_the_step_thread_says_after_the_loop_has_closed_is_lost_without_an_error(
    delay_seconds: float,
) -> None:
    async def make() -> TargetLink:
        terms = replace(TERMS, delay_seconds=delay_seconds)
        return TargetLink(1, HELLO, SilentCall(), terms)  # type: ignore[arg-type]

    loop = asyncio.new_event_loop()
    link = loop.run_until_complete(make())
    loop.close()
    link.push([])
    link.refuse(1, Refusal.GAP)
    link.fail(LinkError("gone"))
    assert not link.ended.done()


async def test_an_opening_too_long_for_this_draft_costs_the_session_and_not_the_link(
    desk: Desk,
) -> None:
    too_long = SessionOpening(
        session=3, token_ids=(1,) * TERMS.max_len, seed=1, temperature=0.0, max_len=4096
    )
    async with desk.linked() as call:
        call.send(too_long)
        while not isinstance(answer := await call.receive(), SessionRefusal):
            pass
        assert answer == SessionRefusal(3, "length")
        call.send(replace(too_long, session=4, token_ids=(1,) * (TERMS.max_len - 1)))
        call.send(Heartbeat(nonce=1))
        while await call.receive() != Heartbeat(echo=1):
            pass
        heard = [type(event).__name__ for event in desk.inbox.drain()]
    assert heard == ["LinkUp", "Opening"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (LinkPolicy(fan_out_policy="nonsense"), HandshakeError),
        (LinkPolicy(fan_out_policy="explicit", fan_out=(1, 2)), HandshakeError),
        (replace(HELLO, epoch=4), FrameError),
        (
            SessionOpening(session=1, token_ids=(1, 99), seed=1, temperature=0.0, max_len=9),
            FrameError,
        ),
    ],
    ids=["policy", "split", "second Hello", "token id"],
)
async def test_what_will_not_change_is_refused_for_good(
    desk: Desk, message: TargetMessage, error: type[LinkError]
) -> None:
    async with desk.linked() as call:
        call.send(message)
        with pytest.raises(error):
            await hear_out(call)


async def test_links_are_bounded_for_each_address(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 4)
    async with desk.linked():
        async with desk.linked(), desk.dialled() as call:
            with pytest.raises(LinkError, match=r"has 2 links, 2 of them from .*; it takes 4"):
                await call.receive()
        async with desk.linked():
            pass


def test_no_address_keeps_another_one_out() -> None:
    assert all(links.may_link(held, held) for held in range(20)), "20 targets behind one address"
    num_links = 0
    for _ in range(6):
        mine = 0
        while links.may_link(mine, num_links):
            mine, num_links = mine + 1, num_links + 1
        assert links.may_link(0, num_links), f"an address took {mine} links"
    assert all(links.may_link(0, held) for held in range(links.MAX_LINKS))
    assert not links.may_link(0, links.MAX_LINKS)


async def test_a_frame_of_more_commits_than_there_are_sessions_ends_its_link(desk: Desk) -> None:
    async with desk.linked() as call:
        sessions = range(1, TERMS.capacity + 2)
        commits = [Commit(session, 5, Outcome(0, 1), Explicit()) for session in sessions]
        rows_RW = pack_commits(commits, TERMS.lookahead)
        GrpcChannel(LinkFrames(call)).send(Frame(FrameKind.COMMITS, HELLO.epoch, 1, rows_RW))
        with pytest.raises(FrameError, match="5 commits, this draft keeps 4 sessions"):
            await hear_out(call)


async def test_openings_that_find_no_room_in_the_inbox_are_refused_and_others_served(
    desk: Desk,
) -> None:
    opening = SessionOpening(session=1, token_ids=(1, 2), seed=1, temperature=0.0, max_len=9)
    async with desk.linked() as flooding, desk.linked() as other:
        for session in range(1, 200):
            flooding.send(replace(opening, session=session))
        while not isinstance(answer := await flooding.receive(), SessionRefusal):
            pass
        assert answer.reason == "max_sessions"
        other.send(opening)
        other.send(Heartbeat(nonce=1))
        while (answer := await other.receive()) != Heartbeat(echo=1):
            assert not isinstance(answer, SessionRefusal)


@pytest.mark.parametrize("max_len", [20, 4096, 1 << 20])
def test_any_opening_that_a_draft_accepts_fits_the_messages_that_it_receives(max_len: int) -> None:
    terms = replace(TERMS, max_len=max_len)
    opening = SessionOpening(
        session=2**31 - 1,
        token_ids=(2**31 - 1,) * (max_len - 1),
        seed=2**64 - 1,
        choice=2**31 - 1,
        temperature=2.0,
        max_len=2**31 - 1,
    )
    num_bytes = speculate_request(opening).ByteSize()
    assert num_bytes <= terms.max_message_bytes <= max(1 << 16, 6 * max_len)


async def test_a_draft_tells_how_long_its_sessions_may_be(desk: Desk) -> None:
    async with desk.dialled() as call:
        welcome = await call.receive()
    assert isinstance(welcome, LinkWelcome)
    assert welcome.max_len == TERMS.max_len
