"""The draft's end of links over real gRPC; no step thread reads the inbox."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from tests.draft_setup import SETUP
from tests.handshake import HELLO
from tests.served import serving

from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.observability.metrics import BAD_FRAMES_TOTAL
from ssd.rpc.client import DraftClient
from ssd.rpc.link import LinkCall
from ssd.rpc.pool_codec import DraftStatus
from ssd.runtime.step_thread import Watchdog
from ssd.speculation.table import frame_bytes, pack_commits
from ssd.testing.clock import FakeClock
from ssd.types import (
    CloseSession,
    Commit,
    Heartbeat,
    LinkSettings,
    OpenSession,
    Outcome,
    SessionRefused,
    TargetMessage,
    Welcome,
)
from ssd_draft import link_server
from ssd_draft.inbox import Inbox, LinkChange
from ssd_draft.link_server import STEP_SECONDS, LinkServer
from ssd_draft.servicer import SpeculationServicer

OPENING = OpenSession(session=1, token_ids=(1, 2), seed=1, temperature=0.0, max_len=9)
MANY_COMMITS = pack_commits(
    [Commit(session, 5, Outcome(0, 1)) for session in range(1, SETUP.settings.max_sessions + 2)],
    SETUP.settings.lookahead,
)
"""More than there can be sessions."""


@dataclass
class Server:
    """A link server with a fake clock, and its client."""

    clock: FakeClock
    watchdog: Watchdog
    inbox: Inbox
    client: DraftClient

    @contextlib.asynccontextmanager
    async def dialled(self) -> AsyncIterator[LinkCall]:
        """A link that has sent its Hello."""
        call = await self.client.open_link()
        try:
            call.send(HELLO)
            yield call
        finally:
            await call.close()

    @contextlib.asynccontextmanager
    async def linked(self) -> AsyncIterator[LinkCall]:
        """A link after its handshake."""
        async with self.dialled() as call:
            assert isinstance(await call.receive(), Welcome)
            yield call


def no_status() -> DraftStatus:
    raise AssertionError


def no_drain(_seconds: float) -> int:
    raise AssertionError


async def receive_all(call: LinkCall) -> None:
    while await call.receive() is not None:
        pass


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    clock = FakeClock()
    watchdog, inbox = Watchdog(clock), Inbox(100, 1 << 20)
    servicer = SpeculationServicer(
        LinkServer(SETUP, inbox, clock, watchdog),
        is_ready=lambda: True,
        status=no_status,
        drain=no_drain,
    )
    async with serving(servicer) as rpc, DraftClient(f"127.0.0.1:{rpc.port}") as client:
        yield Server(clock, watchdog, inbox, client)


async def test_the_inbox_receives_a_link_before_its_messages(server: Server) -> None:
    async with server.linked() as call:
        call.send(CloseSession(1))
        call.send(Heartbeat(nonce=1))
        while await call.receive() != Heartbeat(echo=1):
            pass
        received = [event.content for event in server.inbox.drain()]
    assert received == [LinkChange.UP, CloseSession(1)]


async def test_heartbeats_contain_the_work_for_batches(server: Server) -> None:
    async with server.linked() as call:
        while not (events := server.inbox.drain()):
            await call.receive()
        events[0].link.batch_times.add_batch([0.25, 0.5])
        while (message := await call.receive()) == Heartbeat():
            pass
    assert message == Heartbeat(batch_seconds={2: 0.5})


async def test_a_stuck_step_thread_ends_the_links_and_refuses_new_ones(server: Server) -> None:
    server.watchdog.heartbeat()
    async with server.linked() as call:
        server.clock.advance(STEP_SECONDS)
        with pytest.raises(LinkError, match=r"not ended a step for 20\.0 s"):
            await receive_all(call)
    async with server.dialled() as call:
        with pytest.raises(LinkError, match="not ended a step"):
            await call.receive()
    server.watchdog.heartbeat()
    async with server.linked():
        pass


async def test_an_idle_step_thread_is_not_stuck(server: Server) -> None:
    async with server.linked() as call:
        server.watchdog.heartbeat()
        with server.watchdog.idle():
            server.clock.advance(1000 * STEP_SECONDS)
            call.send(Heartbeat(nonce=1))
            for _ in range(3):
                assert await call.receive() is not None


async def test_an_invalid_frame_ends_its_link_and_is_counted_once(server: Server) -> None:
    before = BAD_FRAMES_TOTAL._value.get()
    async with server.linked() as call:
        for _ in range(20):
            call.send(b"\xf0" * frame_bytes(1, HELLO.lookahead))
        with pytest.raises(LinkError):
            await receive_all(call)
    assert BAD_FRAMES_TOTAL._value.get() == before + 1


async def test_commits_before_the_hello_end_the_link(server: Server) -> None:
    call = await server.client.open_link()
    call.send(pack_commits([Commit(1, 5, Outcome(0, 1))], HELLO.lookahead))
    with pytest.raises(FrameError, match="must be Hello"):
        await call.receive()
    await call.close()


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        (LinkSettings(fan_out_policy="nonsense"), HandshakeError, ""),
        (replace(HELLO, epoch=4), FrameError, ""),
        (replace(OPENING, token_ids=(1, 99)), FrameError, ""),
        (MANY_COMMITS, FrameError, "allowed are 4 commits"),
    ],
    ids=["policy", "second Hello", "token id", "more commits than sessions"],
)
async def test_an_invalid_message_ends_the_link(
    server: Server, message: TargetMessage | bytes, error: type[LinkError], words: str
) -> None:
    async with server.linked() as call:
        call.send(message)
        with pytest.raises(error) as caught:
            await receive_all(call)
    assert words in str(caught.value)


async def test_the_number_of_links_of_an_address_is_limited(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_server, "MAX_LINKS", 4)
    async with server.linked():
        async with server.linked(), server.dialled() as call:
            with pytest.raises(LinkError, match=r"has 2 links, 2 of them from .*; it accepts 4"):
                await call.receive()
        async with server.linked():
            pass


async def test_openings_beyond_the_inbox_are_refused_and_other_links_are_served(
    server: Server,
) -> None:
    async with server.linked() as flooding, server.linked() as other:
        for session in range(1, 200):
            flooding.send(replace(OPENING, session=session))
        while not isinstance(answer := await flooding.receive(), SessionRefused):
            pass
        assert answer.reason == "max_sessions"
        other.send(OPENING)
        other.send(Heartbeat(nonce=1))
        while (answer := await other.receive()) != Heartbeat(echo=1):
            assert not isinstance(answer, SessionRefused)


async def test_an_opening_that_is_too_long_is_refused_with_its_reason(server: Server) -> None:
    token_ids = (1,) * SETUP.model.engine.max_model_len
    async with server.linked() as call:
        call.send(replace(OPENING, token_ids=token_ids, max_len=99))
        while not isinstance(answer := await call.receive(), SessionRefused):
            pass
        assert answer.reason == "length"
