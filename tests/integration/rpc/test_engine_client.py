"""Reports of targets, as a pass reads them."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.pki import Authority, put
from tests.served import serving

from ssd.rpc.credentials import ClientCredentials
from ssd.rpc.security import security_of
from ssd.v1 import admin_pb2, admin_pb2_grpc
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.pod_state import Address
from ssd_operator.runtime import engine_client
from ssd_operator.runtime.engine_client import EngineClients, EngineCredentials
from ssd_target.settings import TargetSettings

KEY = ("team-a", "demo")
TOKEN = "token-of-the-operator"


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Reports once; notes what callers presented."""

    def __init__(self, pool: admin_pb2.GetPoolStatusResponse | None = None) -> None:
        self.pool = pool
        self.presented: list[object] = []
        self.called = asyncio.Event()
        self.is_silent = False

    async def WatchPool(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.presented.append(dict(context.invocation_metadata()).get("authorization"))
        self.called.set()
        if self.is_silent:
            await asyncio.Event().wait()
        yield admin_pb2.WatchPoolResponse(pool=self.pool)


class NotedCredentials(EngineCredentials):
    """Notes that a call has its credentials."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.used = asyncio.Event()

    def of(self, key: Key, service: str, address: Address) -> ClientCredentials:
        self.used.set()
        return super().of(key, service, address)


@asynccontextmanager
async def followed(
    monkeypatch: pytest.MonkeyPatch,
    settings: TargetSettings,
    pool: admin_pb2.GetPoolStatusResponse | None = None,
) -> AsyncIterator[Admin]:
    admin = Admin(pool)
    async with serving(admin, security=security_of(settings, "target")) as server:
        server.set_serving(True)
        monkeypatch.setattr(engine_client, "TARGET_PORT", server.port)
        monkeypatch.setattr(engine_client, "RETRY_SECONDS", 0.01)
        yield admin


async def test_files_that_are_added_while_a_target_is_unreachable_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    files = authority.files(tmp_path / "target", "demo.team-a.svc")
    settings = TargetSettings(
        tls_certificate=files.certificate,
        tls_key=files.key,
        token_file=put(tmp_path / "admins", TOKEN),
    )
    folder = tmp_path / "operator"
    folder.mkdir()
    has_report = asyncio.Event()
    credentials = NotedCredentials(str(folder))
    clients = EngineClients(lambda: 0.0, lambda key: has_report.set(), credentials)
    async with followed(monkeypatch, settings) as admin, asyncio.timeout(10):
        clients.follow(KEY, {"pod": Address("127.0.0.1", is_tls=True, has_tokens=True)}, {"pod"})
        await credentials.used.wait()
        put(folder / "token", TOKEN)
        put(folder / "ca.crt", authority.pem)
        await has_report.wait()
        await clients.close()
    assert set(admin.presented) == {f"Bearer {TOKEN}"}


async def test_the_error_of_calls_is_known_until_a_target_reports_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "operator"
    files = Authority().files(folder, "demo.team-a.svc")
    settings = TargetSettings(
        tls_certificate=files.certificate,
        tls_key=files.key,
        token_file=put(tmp_path / "admins", TOKEN),
    )
    has_report = asyncio.Event()
    credentials = NotedCredentials(str(folder))
    clients = EngineClients(lambda: 0.0, lambda key: has_report.set(), credentials)
    async with followed(monkeypatch, settings), asyncio.timeout(10):
        clients.follow(KEY, {"pod": Address("127.0.0.1", is_tls=True, has_tokens=True)}, {"pod"})
        for _ in range(3):  # each call after the first begins when the one before has failed
            credentials.used.clear()
            await credentials.used.wait()
        assert "token" in clients.errors(KEY)["pod"]
        put(folder / "token", TOKEN)
        await has_report.wait()
        assert clients.errors(KEY) == {}
        await clients.close()
    warnings = [each for each in caplog.records if each.getMessage() == "target_unreachable"]
    assert len(warnings) == 1


async def test_a_target_that_accepts_calls_and_never_reports_has_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "POLL_SECONDS", 0.05)
    clients = EngineClients(lambda: 0.0, lambda key: None, EngineCredentials(""))
    async with followed(monkeypatch, TargetSettings()) as admin, asyncio.timeout(10):
        admin.is_silent = True
        clients.follow(KEY, {"pod": Address("127.0.0.1")}, {"pod"})
        for _ in range(2):  # the second call begins when the first one has failed
            await admin.called.wait()
            admin.called.clear()
        await clients.close()
    assert clients.errors(KEY) == {"pod": "no report within 0.05 s"}


async def test_a_report_with_an_impossible_number_is_no_report_and_its_reason_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    credentials = NotedCredentials("")
    clients = EngineClients(lambda: 0.0, lambda key: None, credentials)
    pool = admin_pb2.GetPoolStatusResponse(eligible_sequences=math.nan)
    async with followed(monkeypatch, TargetSettings(), pool), asyncio.timeout(10):
        clients.follow(KEY, {"pod": Address("127.0.0.1", is_tls=False, has_tokens=False)}, {"pod"})
        for _ in range(2):  # the second call begins when the first has failed
            await credentials.used.wait()
            credentials.used.clear()
        assert clients.errors(KEY)["pod"].startswith("eligible_sequences: is nan, must be in ")
        assert clients.state(KEY)[0] == {}
        await clients.close()
