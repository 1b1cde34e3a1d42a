"""The port of the plugin: status, changes of speculation, and a port that cannot be bound."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.handshake import HELLO
from tests.pki import Authority, put
from tests.ports import free_port

from ssd.errors import AccessError, FieldError, NotAllowedError, NotReadyError
from ssd.observability.metrics import DESIRED_DRAFT_REPLICAS, OPEN_SESSIONS
from ssd.pool.dialer import LinkDialer
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog, SequenceCounts
from ssd.ports import SystemClock
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import SpeculationChange
from ssd.rpc.credentials import ClientCredentials
from ssd.rpc.pool_codec import PoolStatus
from ssd.speculation.controller import Controller
from ssd.types import LinkSettings, Mode
from ssd_vllm.pool_server import PoolServer
from ssd_vllm.settings import PluginSettings
from ssd_vllm.step_control import StepControl

LOOKAHEAD = 3
CLOCK = SystemClock()
SETTINGS = PluginSettings(drafts=("127.0.0.1:1",))
IDENTITY = PoolStatus(weights_fingerprint="sha256:w", dtype="float16", dtype_reason="dtype of vLLM")


class RecordingPool(DraftPool):
    """Keeps the settings that it is given."""

    deadline_seconds = 0.0

    def configure(self, settings: object) -> None:
        self.deadline_seconds = settings.deadline_seconds  # type: ignore[attr-defined]


Parts = tuple[RecordingPool, StepControl]


def served() -> Parts:
    controller = Controller(tuple(range(1, LOOKAHEAD + 2)), LOOKAHEAD)
    control = StepControl(controller, Mode.AUTO, LOOKAHEAD, RoundLog(), CLOCK)
    return RecordingPool(SETTINGS, LOOKAHEAD, 10, CLOCK), control


@contextlib.asynccontextmanager
async def running(server: PoolServer) -> AsyncIterator[None]:
    task = asyncio.create_task(server.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def make(parts: Parts, port: int, settings: PluginSettings = SETTINGS) -> PoolServer:
    def dialer() -> LinkDialer:
        return LinkDialer(parts[0], settings.drafts, HELLO, LinkSettings())

    return PoolServer(settings, port, *parts, IDENTITY, dialer)


async def first_status(client: TargetClient) -> PoolStatus:
    """The status once the port answers; a call waits for the connection."""
    while True:
        with contextlib.suppress(NotReadyError):
            return await client.pool_status()
        await asyncio.sleep(0)


async def test_the_port_has_the_status_of_the_pool() -> None:
    parts, port = served(), free_port()
    parts[1].round_log.set_counts(SequenceCounts(running=2, eligible=2), CLOCK.now())
    async with running(make(parts, port)), TargetClient(f"127.0.0.1:{port}") as client:
        status = await first_status(client)
    assert [each.address for each in status.links] == ["127.0.0.1:1"]
    assert status.running_sequences == 2
    assert (status.weights_fingerprint, status.dtype) == ("sha256:w", "float16")


async def test_speculation_is_changed_from_the_next_step_on() -> None:
    (pool, control), port = served(), free_port()
    async with running(make((pool, control), port)), TargetClient(f"127.0.0.1:{port}") as client:
        await first_status(client)
        change = SpeculationChange(mode=Mode.AUTOREGRESSIVE, draft_deadline_ms=7.0)
        await client.set_speculation(change)
        with pytest.raises(FieldError, match="SYNCHRONOUS does not exist in vLLM"):
            await client.set_speculation(SpeculationChange(mode=Mode.SYNCHRONOUS))
    assert control.mode is Mode.AUTOREGRESSIVE
    assert pool.deadline_seconds == pytest.approx(0.007)


async def test_links_that_begin_again_keep_the_fan_out_that_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: asyncio.Queue[LinkSettings] = asyncio.Queue()
    monkeypatch.setattr(LinkDialer, "configure", lambda _self, given: begun.put_nowait(given))
    server = make(served(), 0)
    async with running(server), asyncio.timeout(60):
        assert (await begun.get()).fan_out_policy == SETTINGS.fan_out
        server.set_speculation(SpeculationChange(fan_out_policy="uniform"))
        assert (await begun.get()).fan_out_policy == "uniform"
    async with running(server), asyncio.timeout(60):
        assert (await begun.get()).fan_out_policy == "uniform"


async def test_a_port_in_use_leaves_the_links_running(caplog: pytest.LogCaptureFixture) -> None:
    parts = served()
    OPEN_SESSIONS.set(9)
    DESIRED_DRAFT_REPLICAS.set(9)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        server = make(parts, bound.getsockname()[1])
        async with running(server), asyncio.timeout(60):
            while not server.status().links:  # noqa: ASYNC110 - reports have no event
                await asyncio.sleep(0)
    assert "admin_port_failed" in caplog.text
    assert OPEN_SESSIONS._value.get() == 0
    assert DESIRED_DRAFT_REPLICAS._value.get() == 0


async def test_with_mutual_tls_only_the_operator_calls_over_tls_with_its_token(
    tmp_path: Path,
) -> None:
    authority = Authority()
    server = authority.files(tmp_path / "server", "demo.here.svc")
    token = put(tmp_path / "admins", "token-of-the-operator")
    settings = replace(
        SETTINGS,
        tls_certificate=server.certificate,
        tls_key=server.key,
        tls_client_ca=server.ca,
        admin_names=("operator",),
        admin_token_file=token,
    )
    parts, port = served(), free_port()

    def client(name: str, token: str = token) -> TargetClient:
        files = authority.files(tmp_path / name, name)
        credentials = ClientCredentials(files, token, "demo.here.svc")
        return TargetClient(f"127.0.0.1:{port}", credentials=credentials)

    async with running(make(parts, port, settings)):
        async with client("operator") as operator:
            assert (await first_status(operator)).dtype == "float16"
        async with client("operator", token="") as without_token:
            with pytest.raises(AccessError, match="no token of the role admin"):
                await without_token.pool_status()
        async with client("other") as other:
            with pytest.raises(NotAllowedError, match="none of the names of the role admin"):
                await other.pool_status()
        async with TargetClient(f"127.0.0.1:{port}") as plain:
            with pytest.raises(NotReadyError):
                await plain.pool_status()
