"""Certificates and tokens from Secrets: who may call, and what happens when a Secret changes."""

import asyncio
import contextlib
import hashlib
import json
import socket
import ssl
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from tests.cluster.e2e.credentials import (
    CHANGE_SECONDS,
    SECURITY,
    TOKENS,
    credentials,
    put_secret,
    target_names,
    tls_secret,
)
from tests.cluster.kube import Kube, Object, Release, eventually, sample
from tests.pki import Authority, put

from ssd.errors import AccessError, HandshakeError, NotReadyError, SSDError
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.credentials import ClientCredentials, TlsFiles
from ssd.types import SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
NAME = "secure"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@dataclass(frozen=True)
class Secured:
    """A resource with mutual TLS and tokens, and what its callers need."""

    kube: Kube
    authority: Authority
    folder: Path

    def credentials(self, token: str = "", *names: str) -> ClientCredentials:
        """Those of a caller whose certificate has these names."""
        files = self.authority.files(self.folder / "caller", *(names or ("client.example",)))
        token_file = put(self.folder / "token", token) if token else ""
        return ClientCredentials(files, token_file, f"{NAME}.{self.kube.namespace}.svc")

    def generate(self, credentials: ClientCredentials) -> str:
        """The text of a request, or the error."""

        async def call() -> str:
            endpoint = self.kube.endpoint(NAME)
            async with TargetClient(endpoint, credentials=credentials, ready_seconds=5) as client:
                return "".join([each.text async for each in client.generate("def f", GREEDY)])

        return asyncio.run(_bounded(call()))

    def generate_over_http(self) -> str:
        """The text of a request to the gateway, which needs no key."""
        service = self.kube.get("service", f"{NAME}-gateway")
        base = f"http://{service['spec']['clusterIP']}:8000/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            found = client.completions.create(
                model=NAME, prompt="def f", max_tokens=GREEDY.max_tokens, temperature=0.0
            )
        return found.choices[0].text


async def _bounded(call: Awaitable[str]) -> str:
    async with asyncio.timeout(240):
        return await call


def secured_resource() -> Object:
    document = sample(NAME, drafts=1)
    document["spec"]["security"] = SECURITY
    document["spec"]["gateway"] = {"enabled": True, "tlsSecretName": "gateway-tls"}
    return document


@pytest.fixture(scope="module")
def secured(
    kube: Kube, release: Release, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    authority = Authority()
    put_secret(kube, "gateway-tls", tls_secret(authority, "gateway.example"))
    with credentials(kube, release, authority, NAME), kube.applied(secured_resource()):
        kube.wait_ready(NAME)
        # The operator reads the links of the target, so it is admitted too.
        kube.wait_linked(NAME, 1)
        kube.wait_for(NAME, "GatewayReady", "True", timeout=120)
        yield Secured(kube, authority, tmp_path_factory.mktemp("credentials"))
    kube("delete", "secret", "gateway-tls")


def test_a_client_needs_a_certificate_and_a_token_of_clients(secured: Secured) -> None:
    assert secured.generate(secured.credentials(TOKENS["clients"]))
    for token in ("", "a-token-that-is-wrong", TOKENS["links"]):
        with pytest.raises(AccessError, match="client"):
            secured.generate(secured.credentials(token))
    files = TlsFiles(ca=put(secured.folder / "ca.crt", secured.authority.pem))
    token_file = put(secured.folder / "token", TOKENS["clients"])
    without = ClientCredentials(files, token_file, f"{NAME}.{secured.kube.namespace}.svc")
    with pytest.raises(NotReadyError, match="a client certificate"):
        secured.generate(without)


def test_a_gateway_presents_its_certificate_and_a_token_to_the_target(secured: Secured) -> None:
    direct = secured.generate(secured.credentials(TOKENS["clients"]))
    assert secured.generate_over_http() == direct


def test_only_the_identity_of_the_target_opens_a_link(secured: Secured) -> None:
    namespace = secured.kube.namespace
    (pod,) = secured.kube.pods(NAME, "draft")
    address = f"{pod['status']['podIP']}:50052"

    async def open_link(credentials: ClientCredentials) -> object:
        named = credentials.of_server(f"{NAME}-draft.{namespace}.svc")
        async with DraftClient(address, named) as client, asyncio.timeout(120):
            link = await client.open_link()
            try:
                return await link.receive()
            finally:
                await link.close()

    for token in (TOKENS["clients"], TOKENS["links"]):
        with pytest.raises(HandshakeError, match="credentials"):
            asyncio.run(open_link(secured.credentials(token)))
    target = secured.credentials(TOKENS["links"], *target_names(secured.kube, NAME))
    with pytest.raises(SSDError, match="Hello"):
        # It is admitted, and the draft waits for its Hello.
        asyncio.run(open_link(target))


def test_changed_secrets_apply_without_a_restart(
    secured: Secured, figures: dict[str, object]
) -> None:
    kube = secured.kube
    before = kube.uids(NAME, "target", "draft", "gateway")
    old = served_certificate(secured)
    put_secret(kube, "target-tls", tls_secret(secured.authority, *target_names(kube, NAME)))
    put_secret(kube, "tokens", TOKENS | {"clients": "another-token-of-clients"})
    renewed = secured.credentials("another-token-of-clients")

    def is_renewed() -> bool:
        with contextlib.suppress(AccessError):
            return bool(secured.generate(renewed)) and served_certificate(secured) != old
        return False

    seconds = eventually(is_renewed, "the new token and certificate are in use", CHANGE_SECONDS)
    figures["a changed Secret is in use, s"] = round(seconds, 1)
    with pytest.raises(AccessError):
        secured.generate(secured.credentials(TOKENS["clients"]))

    def is_served_over_http() -> bool:
        with contextlib.suppress(openai.APIStatusError):
            return bool(secured.generate_over_http())
        return False

    eventually(is_served_over_http, "the gateway presents the new token", CHANGE_SECONDS)
    assert kube.uids(NAME, "target", "draft", "gateway") == before
    for component in ("target", "draft", "gateway"):
        (pod,) = kube.pods(NAME, component)
        assert [each["restartCount"] for each in pod["status"]["containerStatuses"]] == [0]
    kube.wait_linked(NAME, 1)


def served_certificate(secured: Secured) -> str:
    """Digest of the certificate that the target presents to a new connection."""
    files = secured.authority.files(secured.folder / "reader", "client.example")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = secured.kube.endpoint(NAME).rpartition(":")
    name = f"{NAME}.{secured.kube.namespace}.svc"
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None
    return hashlib.sha256(certificate).hexdigest()


def test_the_operator_drains_a_draft_with_its_credentials(
    secured: Secured, release: Release
) -> None:
    (pod,) = secured.kube.pods(NAME, "draft")
    secured.kube("scale", f"ssd/{NAME}", "--replicas=0")
    operator = release.operator()["metadata"]["name"]

    def has_drained() -> bool:
        lines = Kube(release.namespace)("logs", operator).splitlines()
        ended = [json.loads(line) for line in lines if '"drain_ended"' in line]
        return any(each["pod"] == pod["metadata"]["name"] for each in ended if _drained(each))

    eventually(has_drained, "the draft is drained", 60)


def _drained(event: Object) -> bool:
    return bool(event["result"] == "Drained")
