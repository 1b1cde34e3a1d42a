"""A server with certificates and roles, over real connections."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests import served
from tests.pki import Authority, put

from ssd.engine_settings import EngineSettings
from ssd.errors import AccessError, HandshakeError, NotAllowedError, NotReadyError, SSDError
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.credentials import ClientCredentials, TlsFiles
from ssd.rpc.security import security_of
from ssd.rpc.server import RpcServer
from ssd.types import Heartbeat
from ssd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    speculation_pb2,
    speculation_pb2_grpc,
)
from ssd_draft.settings import DraftSettings
from ssd_target.settings import TargetSettings

CLIENT, ADMIN, LINK = "token-of-a-client", "token-of-an-admin", "token-of-a-target"
TARGET_NAME = "spiffe://ssd/ns/a/sa/demo-target"
OPERATOR_NAME = "spiffe://ssd/ns/a/sa/ssd-operator"


class Generate(generate_pb2_grpc.GenerateServiceServicer):
    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return generate_pb2.TokenizeResponse(token_ids=[1])


class Admin(admin_pb2_grpc.AdminServiceServicer):
    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        return admin_pb2.DrainTargetResponse(requests=2)


class Speculation(speculation_pb2_grpc.SpeculationServiceServicer):
    async def Speculate(self, requests: Any, context: Any) -> None:  # noqa: N802
        await context.write(speculation_pb2.SpeculateResponse(heartbeat={"nonce": 5}))

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        return speculation_pb2.DrainDraftResponse(sessions=3)


@contextlib.asynccontextmanager
async def serving(settings: EngineSettings) -> AsyncIterator[RpcServer]:
    is_target = isinstance(settings, TargetSettings)
    security = security_of(settings, "target" if is_target else "draft")
    services = (Generate(), Admin()) if is_target else (Speculation(),)
    async with served.serving(*services, security=security) as server:
        server.set_serving(True)
        yield server


class Caller:
    """Calls a server; each call returns its result or the class of its error."""

    def __init__(self, server: RpcServer, credentials: ClientCredentials) -> None:
        self._address = f"127.0.0.1:{server.port}"
        self._credentials = credentials

    async def tokenize(self) -> object:
        return await _result(_tokenize(self._address, self._credentials))

    async def drain_target(self) -> object:
        async with TargetClient(self._address, credentials=self._credentials) as client:
            return await _result(client.drain(0))

    async def drain_draft(self) -> object:
        async with DraftClient(self._address, self._credentials) as client:
            return await _result(client.drain(0))

    async def link(self) -> object:
        async with DraftClient(self._address, self._credentials) as client:
            link = await client.open_link()
            try:
                return await _result(link.receive())
            finally:
                await link.close()


async def _result(call: Any) -> object:
    try:
        return await call
    except SSDError as error:
        return type(error)


@pytest.fixture
def token(tmp_path: Path) -> Any:
    """Write a file of tokens; returns its path."""
    return lambda text: put(tmp_path / text.split("\n")[0], text)


async def test_each_role_of_a_target_has_its_tokens(token: Any) -> None:
    settings = TargetSettings(token_file=token(CLIENT), admin_token_file=token(ADMIN))
    async with serving(settings) as server:
        for text, generate, drain in (
            (CLIENT, (1,), NotAllowedError),
            (ADMIN, NotAllowedError, 2),
            (LINK, AccessError, AccessError),
        ):
            caller = Caller(server, ClientCredentials(token_file=token(text)))
            assert await caller.tokenize() == generate, text
            assert await caller.drain_target() == drain, text
        assert await Caller(server, ClientCredentials()).tokenize() is AccessError


async def test_a_link_needs_the_token_of_links_and_a_drain_that_of_admins(token: Any) -> None:
    settings = DraftSettings(token_file=token(LINK), admin_token_file=token(ADMIN))
    async with serving(settings) as server:
        for text, link, drain in (
            (LINK, Heartbeat(nonce=5), NotAllowedError),
            (ADMIN, HandshakeError, 3),
            (CLIENT, HandshakeError, AccessError),
        ):
            caller = Caller(server, ClientCredentials(token_file=token(text)))
            assert await caller.link() == link, text
            assert await caller.drain_draft() == drain, text


async def test_without_tokens_of_admins_the_other_tokens_are_needed(token: Any) -> None:
    async with serving(TargetSettings(token_file=token(CLIENT))) as server:
        assert await Caller(server, ClientCredentials()).drain_target() is AccessError
        caller = Caller(server, ClientCredentials(token_file=token(CLIENT)))
        assert await caller.drain_target() == 2


async def test_statuses_of_refused_calls_and_open_health_checks(token: Any) -> None:
    settings = TargetSettings(token_file=token(CLIENT), admin_token_file=token(ADMIN))
    async with serving(settings) as server, TargetClient(f"127.0.0.1:{server.port}") as client:
        await client.wait_ready(5.0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            raw: Any = channel
            for header, code in (
                ((), grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", f"Bearer {CLIENT[:-1]}"),), grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", f"Bearer {ADMIN}"),), grpc.StatusCode.PERMISSION_DENIED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw.unary_unary("/ssd.v1.GenerateService/Tokenize")(b"", metadata=header)
                assert caught.value.code() is code
                assert CLIENT not in str(caught.value.details())


async def test_a_changed_file_of_tokens_applies_to_the_next_call(token: Any) -> None:
    settings = TargetSettings(token_file=token(CLIENT))
    mine = Path(token("token-of-my-client"))
    put(mine, CLIENT)
    async with serving(settings) as server:
        caller = Caller(server, ClientCredentials(token_file=str(mine)))
        assert await caller.tokenize() == (1,)
        put(Path(settings.token_file), "another-token-of-a-client")
        assert await caller.tokenize() is AccessError
        put(mine, "another-token-of-a-client")
        assert await caller.tokenize() == (1,)


async def test_connections_are_protected_by_tls(tmp_path: Path) -> None:
    authority = Authority()
    files = authority.files(tmp_path / "server", "127.0.0.1", "demo.svc")
    settings = TargetSettings(tls_certificate=files.certificate, tls_key=files.key)
    trusted = TlsFiles(ca=files.ca)
    async with serving(settings) as server:
        address = f"127.0.0.1:{server.port}"
        assert await Caller(server, ClientCredentials(trusted)).tokenize() == (1,)
        assert await Caller(server, ClientCredentials()).tokenize() is NotReadyError
        stranger = TlsFiles(ca=put(tmp_path / "other.crt", Authority("other").pem))
        with pytest.raises(AccessError, match="certificate is not accepted: unable to get local"):
            await _tokenize(address, ClientCredentials(stranger))
        assert await _tokenize(address, ClientCredentials(trusted).of_server("demo.svc")) == (1,)
        with pytest.raises(AccessError, match="certificate is not for this name"):
            await _tokenize(address, ClientCredentials(trusted).of_server("other.svc"))
    async with serving(TargetSettings()) as server:
        with pytest.raises(AccessError, match="the server does not use TLS"):
            await _tokenize(f"127.0.0.1:{server.port}", ClientCredentials(trusted))


async def _tokenize(address: str, credentials: ClientCredentials) -> object:
    async with TargetClient(address, credentials=credentials, ready_seconds=0) as client:
        return await client.tokenize("x")


async def test_mutual_tls_gives_roles_by_the_names_of_certificates(tmp_path: Path) -> None:
    authority = Authority()
    draft = authority.files(tmp_path / "draft", "127.0.0.1")
    settings = DraftSettings(
        tls_certificate=draft.certificate,
        tls_key=draft.key,
        tls_client_ca=draft.ca,
        caller_names=(TARGET_NAME,),
        admin_names=(OPERATOR_NAME,),
    )
    async with serving(settings) as server:
        for names, link, drain in (
            ((TARGET_NAME, "demo.default.svc"), Heartbeat(nonce=5), NotAllowedError),
            ((OPERATOR_NAME,), HandshakeError, 3),
            (("spiffe://ssd/ns/a/sa/client",), HandshakeError, NotAllowedError),
        ):
            files = authority.files(tmp_path / "caller", *names)
            caller = Caller(server, ClientCredentials(files))
            assert await caller.link() == link, names
            assert await caller.drain_draft() == drain, names
        anonymous = Caller(server, ClientCredentials(TlsFiles(ca=draft.ca)))
        assert await anonymous.drain_draft() is NotReadyError, "without a certificate"
        files = Authority("other").files(tmp_path / "other", TARGET_NAME)
        forged = TlsFiles(certificate=files.certificate, key=files.key, ca=draft.ca)
        assert await Caller(server, ClientCredentials(forged)).drain_draft() is NotReadyError


async def test_replaced_certificates_apply_to_new_connections_without_a_restart(
    tmp_path: Path,
) -> None:
    old, new = Authority("old"), Authority("new")
    server_files = old.files(tmp_path / "server", "127.0.0.1")
    client_files = old.files(tmp_path / "client", "x")
    settings = TargetSettings(
        tls_certificate=server_files.certificate,
        tls_key=server_files.key,
        tls_client_ca=server_files.ca,
    )
    credentials = ClientCredentials(client_files)
    async with serving(settings) as server:
        address = f"127.0.0.1:{server.port}"
        async with TargetClient(address, credentials=credentials, ready_seconds=0) as client:
            assert await client.tokenize("x") == (1,)
            new.files(tmp_path / "server", "127.0.0.1")
            assert await client.tokenize("x") == (1,), "a connection that is up stays"
            assert await Caller(server, credentials).tokenize() is AccessError
            new.files(tmp_path / "client", "x")
            assert await client.tokenize("x") == (1,), "by a new connection"
            assert client._num_calls == {}, "the old channel is closed"
        assert await Caller(server, credentials).tokenize() == (1,)
