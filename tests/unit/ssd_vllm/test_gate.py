"""The gate before vLLM: who is refused, and which certificate new connections get."""

import json
import ssl
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.pki import Authority, put

from ssd.errors import SettingsError
from ssd.observability.metrics import TLS_CERTIFICATE_EXPIRY
from ssd_vllm import Gate

Message = MutableMapping[str, Any]
TOKEN, OTHER = "token-of-clients-0", "token-of-clients-1"
SERVED = [{"type": "served"}]


class Vllm:
    """A server behind its gate."""

    def __init__(self, token_file: str = "", **config: Any) -> None:
        given = {"ssl": None, "ssl_certfile": None, "ssl_keyfile": None, **config}
        settings = {"ssd": {"token_file": token_file}}
        state = SimpleNamespace(
            vllm_config=SimpleNamespace(additional_config=settings),
            server=SimpleNamespace(config=SimpleNamespace(**given)),
        )
        self._app = SimpleNamespace(state=state)
        self._gate = Gate(self._serve)

    async def call(self, path: str, token: str | None = None, **scope: Any) -> list[Message]:
        """Return what the server sends."""
        sent: list[Message] = []

        async def receive() -> Message:
            raise NotImplementedError

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        request = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await self._gate(request | {"app": self._app} | scope, receive, send)
        return sent

    async def _serve(self, _scope: Message, _receive: object, send: Any) -> None:
        await send(SERVED[0])


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return put(tmp_path / "clients", f"{TOKEN}\n{OTHER}\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/invocations", "/health/x"])
@pytest.mark.parametrize("token", [None, "token-of-links-00", ""])
async def test_a_request_without_a_token_of_clients_is_refused(
    token_file: str, path: str, token: str | None
) -> None:
    start, body = await Vllm(token_file).call(path, token)
    assert start["status"] == 401
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "invalid_api_key"


async def test_any_token_of_the_file_is_accepted_and_a_changed_file_is_read(
    token_file: str,
) -> None:
    vllm = Vllm(token_file)
    assert await vllm.call("/v1/models", TOKEN) == await vllm.call("/v1/models", OTHER) == SERVED
    put(Path(token_file), f"{OTHER}\n")
    assert await vllm.call("/v1/models", OTHER) == SERVED
    assert (await vllm.call("/v1/models", TOKEN))[0]["status"] == 401


async def test_probes_metrics_and_questions_of_browsers_need_no_token(token_file: str) -> None:
    vllm = Vllm(token_file)
    assert await vllm.call("/health") == await vllm.call("/metrics") == SERVED
    assert await vllm.call("/v1/models", method="OPTIONS") == SERVED


async def test_a_web_socket_without_a_token_is_closed(token_file: str) -> None:
    (closed,) = await Vllm(token_file).call("/v1/realtime", type="websocket")
    assert closed == {"type": "websocket.close", "code": 1008}


async def test_without_a_file_no_request_needs_a_token() -> None:
    assert await Vllm().call("/v1/models") == SERVED


async def test_the_start_of_the_server_is_no_request(token_file: str) -> None:
    assert await Vllm(token_file).call("", type="lifespan", app=None) == SERVED


async def test_a_file_that_is_missing_fails_the_request(tmp_path: Path) -> None:
    vllm = Vllm(str(tmp_path / "missing"))
    for _ in range(2):
        with pytest.raises(SettingsError, match="missing: No such file"):
            await vllm.call("/v1/models", TOKEN)


async def test_new_connections_get_the_certificate_that_is_in_the_files_now(
    tmp_path: Path,
) -> None:
    authority = Authority()
    files = authority.files(tmp_path, "vllm.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    vllm = Vllm(ssl=context, ssl_certfile=files.certificate, ssl_keyfile=files.key)
    await vllm.call("/health")
    first = certificate_of(context)
    expires_at = TLS_CERTIFICATE_EXPIRY.labels(role="server")._value.get()

    put(Path(files.certificate), "half of a change")
    await vllm.call("/health")
    assert certificate_of(context) == first

    authority.days = 2
    authority.files(tmp_path, "vllm.example")
    await vllm.call("/health")
    assert certificate_of(context) == text_of(files.certificate) != first
    new = TLS_CERTIFICATE_EXPIRY.labels(role="server")._value.get()
    assert new - expires_at == pytest.approx(86400, abs=60)


async def test_one_file_may_have_the_certificate_and_its_key(tmp_path: Path) -> None:
    files = Authority().files(tmp_path, "vllm.example")
    both = tmp_path / "both.pem"
    both.write_text(text_of(files.certificate) + text_of(files.key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    vllm = Vllm(ssl=context, ssl_certfile=str(both), ssl_keyfile=None)
    assert await vllm.call("/health") == SERVED


def text_of(path: str) -> str:
    return Path(path).read_text()


def certificate_of(context: ssl.SSLContext) -> str:
    """The certificate that a client of this server gets, as PEM."""
    of_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    of_client.check_hostname, of_client.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = of_client.wrap_bio(down, up)
    server = context.wrap_bio(up, down, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return ssl.DER_cert_to_PEM_cert(found)
