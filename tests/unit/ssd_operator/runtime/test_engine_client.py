"""Reports of targets, as a pass reads them."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.pki import Authority, put

from ssd.rpc.credentials import ClientCredentials
from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd.rpc.security import security_of
from ssd.rpc.server import RpcServer
from ssd.v1 import admin_pb2, admin_pb2_grpc
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.pod_state import Address
from ssd_operator.runtime import engine_client
from ssd_operator.runtime.engine_client import EngineClients, pool_fact
from ssd_operator.runtime.engine_credentials import EngineCredentials
from ssd_target.settings import TargetSettings

KEY = ("team-a", "demo")
TOKEN = "token-of-the-operator"


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Reports once; notes what callers presented."""

    def __init__(self) -> None:
        self.presented: list[object] = []
        self.called = asyncio.Event()

    async def WatchPool(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.presented.append(dict(context.invocation_metadata()).get("authorization"))
        self.called.set()
        yield admin_pb2.WatchPoolResponse()


class NotedCredentials(EngineCredentials):
    """Notes that a call has its credentials."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.used = asyncio.Event()

    def of(self, key: Key, service: str, address: Address) -> ClientCredentials:
        self.used.set()
        return super().of(key, service, address)


async def followed(
    monkeypatch: pytest.MonkeyPatch, settings: TargetSettings
) -> tuple[RpcServer, Admin]:
    admin = Admin()
    server = RpcServer("127.0.0.1", 0, security=security_of(settings, "target"))
    server.add(
        "ssd.v1.AdminService", partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin)
    )
    await server.start()
    server.set_serving(True)
    monkeypatch.setattr(engine_client, "TARGET_PORT", server.port)
    monkeypatch.setattr(engine_client, "RETRY_SECONDS", 0.01)
    return server, admin


async def test_a_target_without_tls_receives_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Authority().files(tmp_path, "spiffe://ssd/ns/ssd/sa/ssd-operator")
    put(tmp_path / "token", TOKEN)
    server, admin = await followed(monkeypatch, TargetSettings())
    clients = EngineClients(lambda: 0.0, lambda key: None, EngineCredentials(str(tmp_path)))
    clients.follow(KEY, {"pod": Address("127.0.0.1", has_tokens=True)}, {"pod"})
    async with asyncio.timeout(10):
        await admin.called.wait()
    await clients.close()
    await server.stop(0)
    assert set(admin.presented) == {None}


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
    server, admin = await followed(monkeypatch, settings)
    has_report = asyncio.Event()
    credentials = NotedCredentials(str(folder))
    clients = EngineClients(lambda: 0.0, lambda key: has_report.set(), credentials)
    clients.follow(KEY, {"pod": Address("127.0.0.1", is_tls=True, has_tokens=True)}, {"pod"})
    async with asyncio.timeout(10):
        await credentials.used.wait()
    put(folder / "token", TOKEN)
    put(folder / "ca.crt", authority.pem)
    async with asyncio.timeout(10):
        await has_report.wait()
    await clients.close()
    await server.stop(0)
    assert set(admin.presented) == {f"Bearer {TOKEN}"}


def test_the_report_of_a_target_becomes_a_fact() -> None:
    link = LinkStatus(address="a:1", state="active", draft_pod="d", draft_weights="sha256:d")
    status = PoolStatus(
        links=(link,),
        tokens_per_round=3.0,
        efficiency=0.9,
        weights_fingerprint="sha256:t",
        dtype="float32",
        dtype_reason="no packing",
    )
    fact = pool_fact("t", status, 7.0)
    assert (fact.target_pod, fact.at, fact.links[0].state) == ("t", 7.0, "Active")
    assert (fact.tokens_per_round, fact.efficiency) == (3.0, 0.9)
    assert (fact.dtype, fact.dtype_reason) == ("float32", "no packing")
    assert (fact.weights_fingerprint, fact.links[0].draft_weights) == ("sha256:t", "sha256:d")
