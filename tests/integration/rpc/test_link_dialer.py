"""Which addresses are dialled, and when links start and end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.handshake import HELLO, WELCOME
from tests.pki import Authority, put
from tests.served import serving

from ssd import addresses
from ssd.addresses import Resolver, resolve
from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.observability.metrics import (
    LINK_REFUSALS_TOTAL,
    LINK_RTT_SECONDS,
    LINK_STATE,
    LINK_TRANSPORT_INFO,
)
from ssd.pool import dialer, handshake
from ssd.pool.dialer import LinkDialer, LinkReport, redial_pause
from ssd.pool.handshake import LinkTerms
from ssd.pool.link import DraftLink, LinkState
from ssd.pool.link_thread import doorbell
from ssd.pool.pool import DraftPool
from ssd.pool.settings import DraftsSettings
from ssd.ports import SystemClock
from ssd.rpc.access import OPEN, Access, Role, Security
from ssd.rpc.credentials import AcceptedTokens, ClientCredentials
from ssd.rpc.link import LinkCall, LinkServerCall
from ssd.rpc.pool_codec import LinkStatus
from ssd.types import Heartbeat, Hello, LinkSettings, Peer
from ssd.v1 import speculation_pb2_grpc

MAX_SECONDS = 60.0
NO_TERMS = LinkTerms()
DRAFT = Peer(pod="demo-draft-0-x", node="n1")


class EchoDraft(speculation_pb2_grpc.SpeculationServiceServicer):
    """Answers the handshake and echoes heartbeats; keeps their nonces and the settings."""

    def __init__(self, refusal: HandshakeError | None) -> None:
        self.refusal = refusal
        """What the settings end the link with."""
        self.work: dict[int, float] = {}
        """The work for batches that it reports before each echo."""
        self.nonces: asyncio.Queue[int] = asyncio.Queue()
        self.settings: asyncio.Queue[LinkSettings] = asyncio.Queue()

    async def Speculate(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        async with LinkServerCall(context) as call:
            hello = await call.receive()
            assert isinstance(hello, Hello)
            call.send(replace(WELCOME, epoch=hello.epoch, peer=DRAFT))
            while (message := await call.receive()) is not None:
                if isinstance(message, Heartbeat):
                    self.nonces.put_nowait(message.nonce)
                    call.send(Heartbeat(batch_seconds=self.work))
                    call.send(Heartbeat(echo=message.nonce))
                elif isinstance(message, LinkSettings):
                    self.settings.put_nowait(message)
                    if self.refusal:
                        raise self.refusal


class WatchedPool(DraftPool):
    """Records when a link starts and when it ends."""

    def __init__(self) -> None:
        settings = DraftsSettings(branches=4, draft_deadline_ms=0.0)
        super().__init__(settings, 6, 10, SystemClock())
        self.events: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def attach(self, link: DraftLink) -> None:
        super().attach(link)
        self.events.put_nowait(("up", link.name))

    def detach(self, link: DraftLink, reason: str) -> None:
        super().detach(link, reason)
        self.events.put_nowait(("down", link.name))

    async def next(self) -> tuple[str, str]:
        async with asyncio.timeout(MAX_SECONDS):
            return await self.events.get()


@dataclass
class FixedAnswers:
    """A resolver with fixed answers; records its queries."""

    answers: dict[str, set[str]] = field(default_factory=dict)
    queries: list[tuple[str, int]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __call__(self, host: str, port: int) -> set[str]:
        async with self.changed:
            self.queries.append((host, port))
            self.changed.notify_all()
        if host not in self.answers:
            raise OSError("no such name")
        return self.answers[host]

    async def wait_for_queries(self, times: int = 2) -> None:
        goal = len(self.queries) + times
        async with self.changed, asyncio.timeout(MAX_SECONDS):
            await self.changed.wait_for(lambda: len(self.queries) >= goal)


@contextlib.asynccontextmanager
async def echo_draft(
    security: Security = OPEN, refusal: HandshakeError | None = None
) -> AsyncIterator[tuple[EchoDraft, int]]:
    draft = EchoDraft(refusal)
    async with serving(draft, security=security) as server:
        yield draft, server.port


@contextlib.asynccontextmanager
async def dialling(
    *drafts: str, names: Resolver = resolve, terms: LinkTerms = NO_TERMS
) -> AsyncIterator[tuple[WatchedPool, LinkDialer]]:
    """A pool and the links of its links; at the end, the pool has none."""
    pool = WatchedPool()
    links = LinkDialer(pool, drafts, HELLO, LinkSettings(), names, terms)
    task = asyncio.create_task(links.run())
    try:
        yield pool, links
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert pool.links() == ()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(dialer, "HEARTBEAT_SECONDS", 0.01)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", ["drafts.svc:50052", "dns:///drafts.svc:50052"])
async def test_addresses_of_a_name_are_dialled_when_they_appear_and_not_after_they_disappear(
    name: str,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        _, port = await first.enter_async_context(echo_draft())
        _, other_port = await stack.enter_async_context(echo_draft())
        one, two = f"127.0.0.1:{port}", f"127.0.0.1:{other_port}"
        names = FixedAnswers({"drafts.svc": {one}})
        async with dialling(name, names=names) as (pool, drafts):
            assert await pool.next() == ("up", one)
            assert names.queries[0] == ("drafts.svc", 50052)
            names.answers["drafts.svc"] = {one, two}
            assert await pool.next() == ("up", two)
            names.answers["drafts.svc"] = {two}
            await names.wait_for_queries()
            assert pool.num_active == 2, "a link that is up stays when its address disappears"
            await first.aclose()
            assert await pool.next() == ("down", one)
            await names.wait_for_queries(3)
            assert [report.status.address for report in drafts.reports()] == [two]
        assert not {(one,), (two,)} & LINK_STATE._metrics.keys(), "no gauge is left"


async def test_new_settings_are_sent_on_the_links_that_are_up() -> None:
    async with echo_draft() as (draft, port):
        address = f"127.0.0.1:{port}"
        async with dialling(address) as (pool, drafts), asyncio.timeout(MAX_SECONDS):
            await pool.next()
            assert await draft.settings.get() == LinkSettings()
            drafts.configure(LinkSettings(fan_out_policy="uniform"))
            assert await draft.settings.get() == LinkSettings(fan_out_policy="uniform")


async def test_messages_of_other_threads_are_sent_through_the_doorbell() -> None:
    rings: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def counted(ring: Callable[[], None]) -> Iterator[Callable[[], None]]:
        def counted_ring() -> None:
            loop.call_soon_threadsafe(rings.put_nowait, None)
            ring()

        with doorbell(counted_ring) as found:
            yield found

    async with echo_draft() as (draft, port):
        address, terms = f"127.0.0.1:{port}", LinkTerms(doorbell=counted)
        async with dialling(address, terms=terms) as (pool, drafts), asyncio.timeout(MAX_SECONDS):
            await pool.next()
            await draft.settings.get()
            drafts.configure(LinkSettings(fan_out_policy="uniform"))
            await draft.settings.get()
            assert rings.empty(), "the loop's own thread needs none"
            link = pool.links()[0]
            while rings.empty():
                # A heartbeat of the loop may be in the queue, whose message takes both along.
                await asyncio.to_thread(link.send, Heartbeat(nonce=2**40))
            while await draft.nonces.get() != 2**40:
                pass


@pytest.mark.usefixtures("fast")
async def test_an_address_without_a_link_is_forgotten_when_it_disappears() -> None:
    names = FixedAnswers({"drafts.svc": {"127.0.0.1:1"}})
    async with dialling("drafts.svc:50052", names=names) as (_, drafts):
        await names.wait_for_queries()
        assert [report.status.address for report in drafts.reports()] == ["127.0.0.1:1"]
        names.answers["drafts.svc"] = set()
        await names.wait_for_queries(3)
        assert drafts.reports() == []


@pytest.mark.usefixtures("fast")
async def test_a_failed_query_ends_no_link() -> None:
    async with echo_draft() as (_, port):
        names = FixedAnswers({"drafts.svc": {f"127.0.0.1:{port}"}})
        async with dialling("drafts.svc:1", "nowhere.svc:1", names=names) as (pool, _):
            await pool.next()
            del names.answers["drafts.svc"]
            await names.wait_for_queries(times=6)
            assert pool.num_active == 1
            assert pool.events.empty()


@pytest.mark.usefixtures("fast")
async def test_ip_addresses_and_localhost_are_dialled_without_a_query() -> None:
    async with echo_draft() as (_, port):
        names = FixedAnswers()
        both = (f"127.0.0.1:{port}", f"localhost:{port}")
        async with dialling(*both, names=names) as (pool, _):
            assert {(await pool.next())[1], (await pool.next())[1]} == set(both)
        assert names.queries == []


@pytest.mark.usefixtures("fast")
async def test_the_round_trip_of_a_link_is_measured_with_heartbeats() -> None:
    async with echo_draft() as (draft, port):
        address = f"127.0.0.1:{port}"
        async with dialling(address) as (_, drafts):
            async with asyncio.timeout(MAX_SECONDS):
                # The second nonce is sent after the echo of the first.
                while await draft.nonces.get() < 2:
                    pass
            report = drafts.reports()[0]
            assert report.status.state is LinkState.ACTIVE
            assert report.link is not None
            assert 0 < report.link.round_trip.seconds < MAX_SECONDS
            assert LINK_RTT_SECONDS.labels(draft=address)._value.get() > 0
            assert LINK_STATE.labels(draft=address)._value.get() == 1


@pytest.mark.usefixtures("fast")
async def test_a_link_has_the_work_that_its_draft_reported_last() -> None:
    async with echo_draft() as (draft, port):
        draft.work = {2: 0.5}
        async with dialling(f"127.0.0.1:{port}") as (pool, _):
            async with asyncio.timeout(MAX_SECONDS):
                while await draft.nonces.get() < 2:
                    pass
            assert pool.links()[0].work_seconds == {2: 0.5}, "the echo after it has none"


async def refusals(drafts: LinkDialer) -> AsyncIterator[LinkStatus]:
    """Yield each status of a refused link once."""
    seen: list[LinkStatus] = []
    while True:
        for status, _ in drafts.reports():
            if status.state is LinkState.REFUSED and status not in seen:
                seen.append(status)
                yield status
        await asyncio.sleep(0)


@pytest.mark.usefixtures("fast")
async def test_a_link_that_is_too_slow_is_reported_with_its_numbers_and_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = iter([0.5, 0.25, 0.002])

    async def measure(_call: LinkCall, _now: Callable[[], float]) -> float:
        return next(measured)

    monkeypatch.setattr(dialer, "FIRST_REMEASURE_SECONDS", 0.01)
    monkeypatch.setattr(dialer, "MAX_REMEASURE_SECONDS", 0.02)
    monkeypatch.setattr(handshake, "measure", measure)
    counter = LINK_REFUSALS_TOTAL.labels(reason="link_too_slow")
    before = counter._value.get()
    async with echo_draft() as (_, port):
        address = f"127.0.0.1:{port}"
        terms = LinkTerms(max_round_trip_seconds=0.002)
        async with dialling(address, terms=terms) as (pool, drafts), asyncio.timeout(MAX_SECONDS):
            reports = refusals(drafts)
            for micros in (500_000, 250_000):
                refused = await anext(reports)
                assert refused.reason.startswith(f"link_too_slow: its round trip is {micros} us")
                assert (refused.transport, refused.round_trip_seconds) == ("tcp", micros / 1e6)
                assert (refused.draft_pod, refused.draft_node) == ("demo-draft-0-x", "n1")
            assert pool.events.empty(), "a refused link never reaches the pool"
            assert await pool.next() == ("up", address)
            assert counter._value.get() == before + 2
            shown = LINK_TRANSPORT_INFO.labels(draft=address, transport="tcp")
            assert shown._value.get() == 1
    assert (address, "tcp") not in LINK_TRANSPORT_INFO._metrics


@pytest.mark.usefixtures("fast")
async def test_a_crash_of_one_link_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[str] = []
    attach = WatchedPool.attach

    def attach_all_but_the_first(pool: WatchedPool, link: DraftLink) -> None:
        if not broken:
            broken.append(link.name)
            raise ZeroDivisionError("a bug")
        attach(pool, link)

    monkeypatch.setattr(dialer, "REFUSED_REDIAL_SECONDS", 0.05)
    monkeypatch.setattr(WatchedPool, "attach", attach_all_but_the_first)
    async with echo_draft() as (_, port), echo_draft() as (_, other_port):
        both = (f"127.0.0.1:{port}", f"127.0.0.1:{other_port}")
        async with dialling(*both) as (pool, _):
            ups = {await pool.next(), await pool.next()}
            assert ups == {("up", address) for address in both}
            assert len(broken) == 1


@pytest.mark.usefixtures("fast")
async def test_a_query_without_an_answer_delays_no_other_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "MAX_RESOLVE_SECONDS", 0.01)
    queried: list[str] = []
    asked_often = asyncio.Event()

    async def resolver(host: str, port: int) -> set[str]:
        queried.append(host)
        if queried.count("drafts.svc") == 4:
            asked_often.set()
        if host == "silent":
            await asyncio.Event().wait()
        if host == "odd":
            raise UnicodeError("label too long")
        return {address}

    async with echo_draft() as (_, port):
        address = f"127.0.0.1:{port}"
        three = ("silent:1", "odd:1", "drafts.svc:1")
        async with dialling(*three, names=resolver) as (pool, _):
            assert await pool.next() == ("up", address)
            await asked_often.wait()
    assert queried.count("silent") == 1, "one query at a time"
    assert queried.count("odd") > 1


@pytest.mark.parametrize(
    ("error", "link_seconds", "pause"),
    [
        (LinkError("gone"), 0.1, 0.8),
        (LinkError("gone"), 60.0, 0.1),
        (FrameError("a frame has 3 bytes"), 60.0, 10.0),
        (HandshakeError("fan_out_policy", "unknown"), 60.0, 10.0),
    ],
)
def test_a_peer_that_broke_the_protocol_or_does_not_fit_is_dialled_after_a_long_pause(
    error: LinkError, link_seconds: float, pause: float
) -> None:
    assert redial_pause(error, 0.4, link_seconds) == pause


@pytest.mark.usefixtures("fast")
async def test_a_policy_that_the_draft_does_not_support_is_reported_with_its_field() -> None:
    refusal = HandshakeError("fan_out_policy", "this draft has no such policy")
    async with (
        echo_draft(refusal=refusal) as (_, port),
        dialling(f"127.0.0.1:{port}") as (_, drafts),
        asyncio.timeout(MAX_SECONDS),
    ):
        refused = await anext(refusals(drafts))
        assert refused.reason == "fan_out_policy: this draft has no such policy"


async def test_a_link_needs_the_credentials_that_its_draft_accepts(tmp_path: Path) -> None:
    authority = Authority()
    draft_files = authority.files(tmp_path / "draft", "127.0.0.1")
    target_files = authority.files(tmp_path / "target", "spiffe://target")
    token = put(tmp_path / "links", "token-of-a-target")
    role = Role(name="link", tokens=AcceptedTokens(token), names=frozenset({"spiffe://target"}))
    security = Security(tls=draft_files, access=Access(role=role))
    wrong = put(tmp_path / "clients", "token-of-a-client")
    async with echo_draft(security) as (_, port):
        reports = {}
        for token_file in (token, wrong):
            terms = LinkTerms(credentials=ClientCredentials(target_files, token_file))
            address = f"127.0.0.1:{port}"
            async with dialling(address, terms=terms) as (_, drafts), asyncio.timeout(MAX_SECONDS):
                status = LinkStatus(address=address, state=LinkState.CONNECTING)
                while status.state is LinkState.CONNECTING:
                    await asyncio.sleep(0)
                    ((status, _),) = drafts.reports() or [LinkReport(status)]
                reports[token_file] = status
        assert reports[token].state is LinkState.ACTIVE
        assert reports[wrong].state is LinkState.REFUSED
        assert "credentials: the token is not one of the role link" in reports[wrong].reason
