"""A real draft process and a scripted target over real gRPC."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.handshake import hello_of
from tests.model_folders import model_folder
from tests.pairs import ANY_PORT, QUICK, draft_of
from tests.processes import ProcessUnderTest, completed

from ssd.errors import HandshakeError, LinkError
from ssd.rpc.client import DraftClient
from ssd.rpc.link import LinkCall
from ssd.speculation.table import OutcomeTable, pack_commits, unpack_tables
from ssd.types import (
    CloseSession,
    Commit,
    DraftMessage,
    Draining,
    Heartbeat,
    Hello,
    OpenSession,
    Outcome,
    SessionRefused,
    Welcome,
)

K = 4
N = 10
SHAPE = (
    *("--lookahead", str(K), "--branches", str(N), "--max-sessions", "3", "--dtype", "float32"),
    *QUICK,
)
ANSWER_SECONDS = 60.0
PROMPT = tuple(b"def fib(n):\n    return fib(n - 1)")


folder = model_folder()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def draft(folder: Path) -> AsyncIterator[ProcessUnderTest]:
    async with draft_of(folder, *SHAPE) as process:
        yield process


@dataclass
class ScriptedTarget:
    """One link of a target; answers the draft's heartbeats if ``has_heartbeat``."""

    call: LinkCall
    hello: Hello
    has_heartbeat: bool = True
    messages: "asyncio.Queue[DraftMessage | LinkError | None]" = field(
        default_factory=asyncio.Queue
    )
    tables: "asyncio.Queue[OutcomeTable]" = field(default_factory=asyncio.Queue)

    async def shake_hands(self) -> Welcome:
        self.call.send(self.hello)
        async with asyncio.timeout(ANSWER_SECONDS):
            welcome = await self.call.receive()
        assert isinstance(welcome, Welcome)
        return welcome

    async def read(self) -> None:
        """Receive all messages but heartbeats, until the link ends."""
        try:
            while (message := await self.call.receive()) is not None:
                if isinstance(message, bytes):
                    self._receive_tables(message)
                elif not isinstance(message, Heartbeat):
                    self.messages.put_nowait(message)
                elif self.has_heartbeat:
                    self.call.send(Heartbeat())
            self.messages.put_nowait(None)
        except LinkError as error:
            self.messages.put_nowait(error)

    def _receive_tables(self, frame: bytes) -> None:
        num_token_ids = self.hello.vocab_size
        for table in unpack_tables(frame, K, max_tables=3, branches=N, num_token_ids=num_token_ids):
            self.tables.put_nowait(table)

    def open(self, session: int, tokens: tuple[int, ...] = PROMPT, max_len: int = 200) -> None:
        self.call.send(
            OpenSession(session=session, token_ids=tokens, seed=7, temperature=0.8, max_len=max_len)
        )

    def commit(self, *commits: Commit) -> None:
        self.call.send(pack_commits(commits, K))

    async def table(self) -> OutcomeTable:
        """Return the next complete table."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while (table := await self.tables.get()).depth < K:
                pass
        return table

    async def receive(self) -> DraftMessage | None:
        async with asyncio.timeout(ANSWER_SECONDS):
            message = await self.messages.get()
        if isinstance(message, LinkError):
            raise message
        return message


def hello(folder: Path, **changes: Any) -> Hello:
    return hello_of(folder, **({"lookahead": K, "branches": N} | changes))


@asynccontextmanager
async def dialled(process: ProcessUnderTest) -> AsyncIterator[LinkCall]:
    async with DraftClient(process.grpc_address) as client:
        call = await client.open_link()
        try:
            yield call
        finally:
            await call.close()


@asynccontextmanager
async def target(
    process: ProcessUnderTest, folder: Path, **changes: Any
) -> AsyncIterator[ScriptedTarget]:
    async with dialled(process) as call:
        scripted = ScriptedTarget(call, hello(folder, **changes))
        welcome = await scripted.shake_hands()
        assert (welcome.max_sessions, welcome.lookahead, welcome.branches) == (3, K, N)
        reader = asyncio.create_task(scripted.read())
        try:
            yield scripted
        finally:
            reader.cancel()


async def sessions_of(process: ProcessUnderTest, expected: int) -> None:
    """Wait until the draft has this number of sessions."""
    async with DraftClient(process.grpc_address) as client, asyncio.timeout(ANSWER_SECONDS):
        while (await client.get_status()).sessions != expected:  # noqa: ASYNC110 - a remote count
            await asyncio.sleep(0.02)


async def test_each_commit_is_followed_by_the_next_table(
    draft: ProcessUnderTest, folder: Path
) -> None:
    async with target(draft, folder) as link:
        link.open(1)
        table = await link.table()
        assert table.base_len == len(PROMPT)
        assert set(table.accepted_N.tolist()) == {0}
        for count in (K, K, 2, 0, K):
            index = len(table.bonus_N) - 1
            outcome = Outcome(int(table.accepted_N[index]), int(table.bonus_N[index]))
            proposal = table.proposal(index, count)
            assert len(proposal) == count
            link.commit(Commit(1, table.base_len, outcome, tokens=proposal))
            following = await link.table()
            assert following.base_len == table.base_len + outcome.accepted + 1
            assert set(following.accepted_N.tolist()) <= set(range(count + 1))
            table = following
        link.commit(Commit(1, table.base_len, Outcome(0, 65), tokens=(66, 67)))
        assert (await link.table()).base_len == table.base_len + 1
        link.call.send(CloseSession(1))
        await sessions_of(draft, 0)


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("wire_version", 99),
        ("vocab_size", 1234),
        ("tokenizer_fingerprint", "other"),
        ("lookahead", K + 1),
        ("branches", N + 1),
    ],
)
async def test_a_target_that_does_not_match_is_refused_with_the_name_of_the_field(
    draft: ProcessUnderTest, folder: Path, field_name: str, value: object
) -> None:
    async with dialled(draft) as call:
        call.send(hello(folder, **{field_name: value}))
        with pytest.raises(HandshakeError) as caught:
            await call.receive()
    assert caught.value.field == field_name


async def test_a_target_without_heartbeats_loses_its_link_and_sessions(
    draft: ProcessUnderTest, folder: Path
) -> None:
    async with target(draft, folder) as link:
        link.open(1)
        await link.table()
        link.has_heartbeat = False
        with pytest.raises(LinkError, match="no heartbeat"):
            await link.receive()
    await sessions_of(draft, 0)


async def test_a_target_that_closes_its_link_leaves_no_session(
    draft: ProcessUnderTest, folder: Path
) -> None:
    async with target(draft, folder) as link:
        link.open(1)
        await link.table()
    await sessions_of(draft, 0)


async def test_a_draft_sends_draining_serves_its_sessions_and_exits_with_0(folder: Path) -> None:
    async with draft_of(folder, *SHAPE) as process:
        async with target(process, folder) as link:
            link.open(1)
            table = await link.table()
            process.signal(signal.SIGTERM)
            assert await link.receive() == Draining()
            link.open(2)
            assert await link.receive() == SessionRefused(2, "draining")
            link.commit(Commit(1, table.base_len, Outcome(0, 70)))
            assert (await link.table()).base_len == table.base_len + 1
            link.call.send(CloseSession(1))
            with pytest.raises(LinkError):
                await link.receive()
        assert await process.wait() == 0


async def test_a_drain_ends_at_its_limit_even_if_sessions_stay_open(folder: Path) -> None:
    async with draft_of(folder, *SHAPE, "--inject-step-ms", "100") as process:
        async with target(process, folder) as link:
            asked_at = asyncio.get_running_loop().time()
            link.open(1)
            await link.table()
            assert asyncio.get_running_loop().time() - asked_at >= 0.3
            async with DraftClient(process.grpc_address) as client:
                assert await client.drain(200) == 1
            assert await link.receive() == Draining()
            with pytest.raises(LinkError):
                await link.receive()
        assert await process.wait() == 0


def test_a_port_in_use_is_reported_before_the_model_is_loaded(
    draft: ProcessUnderTest, folder: Path
) -> None:
    port = draft.grpc_address.rpartition(":")[2]
    ended = completed("ssd_draft", "--model", str(folder), *ANY_PORT, *SHAPE, "--port", port)
    assert ended.code == 1
    lines = [json.loads(each) for each in ended.stderr.splitlines() if each.startswith("{")]
    assert [line["event"] for line in lines] == ["failed"]
    assert lines[0]["error"] == "AddressError"
