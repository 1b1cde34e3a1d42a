"""Which addresses are dialled, when links come and go, and what a draft must agree to."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.rpc.link import LinkCall, LinkServerCall
from ssd.rpc.server import RpcServer
from ssd.speculation.table import row_width
from ssd.telemetry import (
    LINK_REFUSALS_TOTAL,
    LINK_RTT_SECONDS,
    LINK_STATE,
    LINK_TRANSPORT_INFO,
    SystemClock,
)
from ssd.types import WIRE_VERSION, Heartbeat, LinkHello, LinkPolicy, LinkWelcome
from ssd.v1 import speculation_pb2_grpc
from ssd_target.drafts import dialer as links
from ssd_target.drafts.dialer import LinkDialer, LinkReport, check_welcome, is_literal, redial_pause
from ssd_target.drafts.link import DraftLink, LinkState
from ssd_target.drafts.link_quality import LinkRequirement
from ssd_target.drafts.pool import DraftPool
from ssd_target.settings import TargetSettings

HELLO = LinkHello(
    wire_version=WIRE_VERSION,
    vocab_size=10,
    tokenizer_fingerprint="f",
    lookahead=6,
    branches=24,
    channel="grpc",
    epoch=3,
)
WELCOME = LinkWelcome(epoch=3, max_sessions=4, lookahead=6, branches=24)
PATIENCE_SECONDS = 10.0


@pytest.mark.parametrize(
    ("address", "literal"),
    [
        ("127.0.0.1:50052", True),
        ("[::1]:50052", True),
        ("localhost:50052", True),
        ("drafts.ssd.svc:50052", False),
        ("dns:///localhost:50052", False),
    ],
)
def test_numbers_and_localhost_are_not_resolved(address: str, *, literal: bool) -> None:
    assert is_literal(address) == literal


def test_a_welcome_must_repeat_what_was_proposed() -> None:
    check_welcome(HELLO, WELCOME)
    for change in ({"epoch": 2}, {"lookahead": 5}, {"branches": 12}):
        with pytest.raises(HandshakeError, match=next(iter(change))):
            check_welcome(HELLO, replace(WELCOME, **change))  # type: ignore[arg-type]


class PoliteDraft(speculation_pb2_grpc.SpeculationServiceServicer):
    """Shakes hands and answers beats; ``heard`` has the nonces."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[int] = asyncio.Queue()

    async def Speculate(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        async with LinkServerCall(context) as call:
            hello = await call.receive()
            assert isinstance(hello, LinkHello)
            call.send(replace(WELCOME, epoch=hello.epoch))
            while (message := await call.receive()) is not None:
                if isinstance(message, Heartbeat):
                    self.heard.put_nowait(message.nonce)
                    call.send(Heartbeat(echo=message.nonce))


class WatchedPool(DraftPool):
    """Says when a link comes and when it goes."""

    def __init__(self) -> None:
        settings = TargetSettings(lookahead=6, branches=4, draft_deadline_ms=0.0)
        super().__init__(settings, 10, SystemClock())
        self.news: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def attach(self, link: DraftLink) -> None:
        super().attach(link)
        self.news.put_nowait(("up", link.name))

    def detach(self, link: DraftLink, reason: str) -> None:
        super().detach(link, reason)
        self.news.put_nowait(("down", link.name))

    async def next(self) -> tuple[str, str]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.news.get()


@dataclass
class Names:
    """A resolver whose answers are set by hand; ``asked`` counts."""

    answers: dict[str, set[str]] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __call__(self, host: str, port: int) -> set[str]:
        async with self.changed:
            self.asked.append((host, port))
            self.changed.notify_all()
        if host not in self.answers:
            raise OSError("no such name")
        return self.answers[host]

    async def until_asked_again(self, times: int = 2) -> None:
        goal = len(self.asked) + times
        async with self.changed, asyncio.timeout(PATIENCE_SECONDS):
            await self.changed.wait_for(lambda: len(self.asked) >= goal)


@contextlib.asynccontextmanager
async def polite() -> AsyncIterator[tuple[PoliteDraft, int]]:
    server = RpcServer("127.0.0.1", 0)
    draft = PoliteDraft()
    register = partial(speculation_pb2_grpc.add_SpeculationServiceServicer_to_server, draft)
    server.add("ssd.v1.SpeculationService", register)
    await server.start()
    try:
        yield draft, server.port
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def kept_up(pool: DraftPool, drafts: LinkDialer) -> AsyncIterator[LinkDialer]:
    running = asyncio.create_task(drafts.run())
    try:
        yield drafts
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert pool.links() == ()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links.RESOLVE_SECONDS == 2.0
    monkeypatch.setattr(links, "RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(links, "HEARTBEAT_SECONDS", 0.01)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", ["drafts.svc:50052", "dns:///drafts.svc:50052"])
async def test_drafts_behind_a_name_are_dialled_when_they_join_and_not_again_when_they_left(
    name: str,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        _, port = await first.enter_async_context(polite())
        _, other_port = await stack.enter_async_context(polite())
        one, two = f"127.0.0.1:{port}", f"127.0.0.1:{other_port}"
        names = Names({"drafts.svc": {one}})
        pool = WatchedPool()
        drafts = LinkDialer(pool, (name,), HELLO, LinkPolicy(), names)
        async with kept_up(pool, drafts):
            assert await pool.next() == ("up", one)
            assert names.asked[0] == ("drafts.svc", 50052)
            names.answers["drafts.svc"] = {one, two}
            assert await pool.next() == ("up", two)
            names.answers["drafts.svc"] = {two}
            await names.until_asked_again()
            assert pool.num_active == 2, "a link that is up outlives its name"
            await first.aclose()
            assert await pool.next() == ("down", one)
            await names.until_asked_again(3)
            assert [report.address for report in drafts.reports()] == [two]
        assert not {(one,), (two,)} & LINK_STATE._metrics.keys(), "what is gone shows nothing"


@pytest.mark.usefixtures("fast")
async def test_an_address_that_never_answered_is_forgotten_with_its_name() -> None:
    names = Names({"drafts.svc": {"127.0.0.1:1"}})
    pool = WatchedPool()
    drafts = LinkDialer(pool, ("drafts.svc:50052",), HELLO, LinkPolicy(), names)
    async with kept_up(pool, drafts):
        await names.until_asked_again()
        assert [report.address for report in drafts.reports()] == ["127.0.0.1:1"]
        names.answers["drafts.svc"] = set()
        await names.until_asked_again(3)
        assert drafts.reports() == []


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_without_addresses_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", failing(number))
    assert await links.resolve("demo-draft-0", 50052) == set()


async def test_a_name_server_that_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", failing(socket.EAI_AGAIN))
    with pytest.raises(OSError, match="as told"):
        await links.resolve("demo-draft-0", 50052)


def failing(number: int) -> Callable[..., object]:
    def getaddrinfo(*_question: object, **_hints: object) -> object:
        raise socket.gaierror(number, "as told")

    return getaddrinfo


@pytest.mark.usefixtures("fast")
async def test_a_name_server_that_fails_costs_no_link() -> None:
    async with polite() as (_, port):
        names = Names({"drafts.svc": {f"127.0.0.1:{port}"}})
        pool = WatchedPool()
        drafts = LinkDialer(pool, ("drafts.svc:1", "nowhere.svc:1"), HELLO, LinkPolicy(), names)
        async with kept_up(pool, drafts):
            await pool.next()
            del names.answers["drafts.svc"]
            await names.until_asked_again(times=6)
            assert pool.num_active == 1
            assert pool.news.empty()


@pytest.mark.usefixtures("fast")
async def test_numbers_and_localhost_are_dialled_as_they_are() -> None:
    async with polite() as (_, port):
        names = Names()
        pool = WatchedPool()
        addresses = (f"127.0.0.1:{port}", f"localhost:{port}")
        async with kept_up(pool, LinkDialer(pool, addresses, HELLO, LinkPolicy(), names)):
            assert {(await pool.next())[1], (await pool.next())[1]} == set(addresses)
        assert names.asked == []


@pytest.mark.usefixtures("fast")
async def test_the_round_trip_of_a_link_is_measured_by_its_beats() -> None:
    async with polite() as (draft, port):
        pool = WatchedPool()
        address = f"127.0.0.1:{port}"
        async with kept_up(pool, LinkDialer(pool, (address,), HELLO, LinkPolicy())) as drafts:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (
                    await draft.heard.get() < 2
                ):  # The second question means an answer to the first.
                    pass
            report = drafts.reports()[0]
            assert report.state is LinkState.ACTIVE
            assert report.link is not None
            assert 0 < report.link.round_trip.seconds < PATIENCE_SECONDS
            assert LINK_RTT_SECONDS.labels(draft=address)._value.get() > 0
            assert LINK_STATE.labels(draft=address)._value.get() == 1


async def refusals(drafts: LinkDialer) -> AsyncIterator[LinkReport]:
    """Each report of a refused link, as it comes."""
    seen: list[LinkReport] = []
    while True:
        for report in drafts.reports():
            if report.state is LinkState.REFUSED and report not in seen:
                seen.append(report)
                yield report
        await asyncio.sleep(0)


@pytest.mark.usefixtures("fast")
async def test_a_link_that_is_too_slow_is_told_with_its_numbers_and_used_when_it_is_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = iter([0.5, 0.25, 0.001])

    async def measure(_call: LinkCall, _now: Callable[[], float]) -> float:
        return next(measured)

    assert links.FIRST_REMEASURE_SECONDS == 1.0
    monkeypatch.setattr(links, "FIRST_REMEASURE_SECONDS", 0.01)
    monkeypatch.setattr(links, "LONGEST_REMEASURE_SECONDS", 0.02)
    monkeypatch.setattr(links, "measure", measure)
    counter = LINK_REFUSALS_TOTAL.labels(reason="link_too_slow")
    before = counter._value.get()
    async with polite() as (_, port):
        pool = WatchedPool()
        address = f"127.0.0.1:{port}"
        requirement = LinkRequirement(max_round_trip_seconds=0.002)
        drafts = LinkDialer(pool, (address,), HELLO, LinkPolicy(), requirement=requirement)
        async with kept_up(pool, drafts), asyncio.timeout(PATIENCE_SECONDS):
            reports = refusals(drafts)
            for micros in (500_000, 250_000):
                refused = await anext(reports)
                assert refused.reason.startswith(f"link_too_slow: its round trip is {micros} us")
                assert refused.found is not None
                assert refused.found.round_trip_seconds == micros / 1e6
                assert refused.peer == WELCOME.peer
            assert pool.news.empty(), "no session was ever offered to it"
            assert await pool.next() == ("up", address)
            assert counter._value.get() == before + 2
            shown = LINK_TRANSPORT_INFO.labels(draft=address, transport="tcp")
            assert shown._value.get() == 1
    assert (address, "tcp") not in LINK_TRANSPORT_INFO._metrics


@pytest.mark.usefixtures("fast")
async def test_no_link_of_today_is_fast_enough_for_a_fabric() -> None:
    async with polite() as (_, port):
        pool = WatchedPool()
        requirement = LinkRequirement(transport="nvlink")
        addresses = (f"127.0.0.1:{port}",)
        drafts = LinkDialer(pool, addresses, HELLO, LinkPolicy(), requirement=requirement)
        async with kept_up(pool, drafts), asyncio.timeout(PATIENCE_SECONDS):
            refused = await anext(refusals(drafts))
            assert "its transport is tcp" in refused.reason
            assert refused.found is not None
            assert refused.found.round_trip_seconds > 0, "measured, not assumed"


class BrokenPool(WatchedPool):
    """Breaks at the first draft it is shown."""

    def attach(self, link: DraftLink) -> None:
        if self.news.empty() and not self.num_broken:
            self.num_broken += 1
            raise ZeroDivisionError("a bug")
        super().attach(link)

    num_broken = 0


@pytest.mark.usefixtures("fast")
async def test_a_bug_in_one_link_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REFUSED_REDIAL_SECONDS", 0.05)
    async with polite() as (_, port), polite() as (_, other_port):
        addresses = (f"127.0.0.1:{port}", f"127.0.0.1:{other_port}")
        pool = BrokenPool()
        async with kept_up(pool, LinkDialer(pool, addresses, HELLO, LinkPolicy())):
            ups = {await pool.next(), await pool.next()}
            assert ups == {("up", address) for address in addresses}
            assert pool.num_broken == 1


@pytest.mark.usefixtures("fast")
async def test_a_name_server_that_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "LONGEST_RESOLVE_SECONDS", 0.01)
    asked: list[str] = []
    asked_often = asyncio.Event()

    async def resolver(host: str, port: int) -> set[str]:
        asked.append(host)
        if asked.count("drafts.svc") == 4:
            asked_often.set()
        if host == "silent":
            await asyncio.Event().wait()
        if host == "odd":
            raise UnicodeError("label too long")
        return {address}

    async with polite() as (_, port):
        address = f"127.0.0.1:{port}"
        pool = WatchedPool()
        names = ("silent:1", "odd:1", "drafts.svc:1")
        async with kept_up(pool, LinkDialer(pool, names, HELLO, LinkPolicy(), resolver)):
            assert await pool.next() == ("up", address)
            await asked_often.wait()
    assert asked.count("silent") == 1, "one question at a time"
    assert asked.count("odd") > 1


@pytest.mark.parametrize("max_sessions", [links.MAX_DRAFT_SESSIONS + 1, 2**32 - 1])
def test_a_draft_that_offers_too_much_is_refused_by_name(max_sessions: int) -> None:
    welcome = LinkWelcome(
        epoch=HELLO.epoch,
        max_sessions=max_sessions,
        lookahead=HELLO.lookahead,
        branches=HELLO.branches,
    )
    with pytest.raises(HandshakeError, match="max_sessions"):
        links.check_welcome(HELLO, welcome)


def test_a_frame_holds_the_tables_of_all_sessions_and_no_more() -> None:
    welcome = LinkWelcome(epoch=1, max_sessions=3, lookahead=2, branches=4)
    limits = links.frame_limits(welcome)
    assert (limits.max_rows, limits.max_width) == (3 * (4 + 1), row_width(2))


@pytest.mark.parametrize(
    ("error", "lived_seconds", "pause"),
    [
        (LinkError("gone"), 0.1, 0.8),
        (LinkError("gone"), 60.0, 0.1),
        (FrameError("a frame has 3 bytes"), 60.0, 10.0),
        (HandshakeError("fan_out_policy", "unknown"), 60.0, 10.0),
    ],
)
def test_a_peer_that_broke_the_rules_or_does_not_fit_is_dialled_seldom(
    error: LinkError, lived_seconds: float, pause: float
) -> None:
    assert redial_pause(error, 0.4, lived_seconds) == pause


class Scold(speculation_pb2_grpc.SpeculationServiceServicer):
    """Shakes hands, and refuses the policy that follows."""

    async def Speculate(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        async with LinkServerCall(context) as call:
            hello = await call.receive()
            assert isinstance(hello, LinkHello)
            call.send(replace(WELCOME, epoch=hello.epoch))
            while not isinstance(await call.receive(), LinkPolicy):
                pass
            raise HandshakeError("fan_out_policy", "this draft has no such policy")


@pytest.mark.usefixtures("fast")
async def test_a_policy_that_a_draft_does_not_follow_is_a_refusal_with_its_field() -> None:
    server = RpcServer("127.0.0.1", 0)
    register = partial(speculation_pb2_grpc.add_SpeculationServiceServicer_to_server, Scold())
    server.add("ssd.v1.SpeculationService", register)
    await server.start()
    pool = WatchedPool()
    drafts = LinkDialer(pool, (f"127.0.0.1:{server.port}",), HELLO, LinkPolicy())
    try:
        async with kept_up(pool, drafts), asyncio.timeout(PATIENCE_SECONDS):
            refused = await anext(refusals(drafts))
            assert refused.reason == "fan_out_policy: this draft has no such policy"
    finally:
        await server.stop(0.0)
