"""Certificates and tokens between clients, vLLM, drafts and the operator, in real processes."""

import shutil
import ssl
import urllib.error
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.pki import Authority
from tests.vllm.runs import Draft
from tests.vllm.server import Server, is_active, serving, until

from ssd.errors import AccessError, NotReadyError
from ssd.rpc.client import TargetClient
from ssd.rpc.credentials import ClientCredentials

pytestmark = pytest.mark.vllm
OPERATOR, TARGET = "spiffe://ssd/ns/ssd/sa/ssd-operator", "spiffe://ssd/ns/here/sa/demo-target"
NAME, DRAFT_NAME = "demo.here.svc", "demo-draft.here.svc"
TOKENS = {each: f"token-of-{each}-0123456789" for each in ("clients", "links", "admins")}
REQUEST = {"prompt": "def mean(values):\n    ", "max_tokens": 60, "temperature": 0.0}
_numbers = count()


def mount(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Replace the files of a Secret as the kubelet does: behind links, all in one step."""
    current, new = folder / "..data", folder / f"..{next(_numbers)}"
    new.mkdir(parents=True)
    for name, content in files.items():
        (new / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data", name))
    old = current.resolve() if current.is_symlink() else None
    (folder / "..new").symlink_to(new.name)
    (folder / "..new").rename(current)
    if old is not None:
        shutil.rmtree(old)


def mount_certificate(folder: Path, authority: Authority, *names: str) -> str:
    """Mount a new certificate; returns it as PEM."""
    certificate, key = authority.issue(*names)
    mount(folder, {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.pem})
    return certificate.decode()


def security(folder: Path) -> dict[str, Any]:
    """The settings that the operator gives to the plugin with mode Mutual and tokens."""
    tls, tokens = folder / "tls", folder / "tokens"
    paths = {
        "tls_certificate": tls / "tls.crt",
        "tls_key": tls / "tls.key",
        "tls_client_ca": tls / "ca.crt",
        "link_ca": tls / "ca.crt",
        "token_file": tokens / "clients",
        "link_token_file": tokens / "links",
        "admin_token_file": tokens / "admins",
    }
    names = {"link_server_name": DRAFT_NAME, "admin_names": [OPERATOR]}
    return {name: str(path) for name, path in paths.items()} | names


def complete(server: Server, token: str) -> list[int]:
    """The token ids of the request."""
    found = server.complete(REQUEST, authorization=f"Bearer {token}")
    return list(found[0]["token_ids"])


def refused(server: Server, token: str) -> int:
    """The status of a request that fails."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        complete(server, token)
    # It is the response, with an open connection.
    caught.value.close()
    return caught.value.code


async def test_callers_need_certificates_and_tokens_which_change_without_a_restart(
    tmp_path: Path,
) -> None:
    authority, tls, tokens = Authority(), tmp_path / "tls", tmp_path / "tokens"
    names = ("127.0.0.1", NAME, TARGET)
    mount_certificate(tls, authority, *names)
    mount(tokens, TOKENS)
    of_draft = authority.files(tmp_path / "draft", DRAFT_NAME)
    of_operator = authority.files(tmp_path / "operator", OPERATOR)
    operator = ClientCredentials(of_operator, str(tokens / "admins"), NAME)
    flags = (
        *("--tls-certificate", of_draft.certificate, "--tls-key", of_draft.key),
        *("--tls-client-ca", of_draft.ca, "--caller-names", TARGET),
        *("--token-file", tokens / "links"),
    )
    with (
        Draft(*flags) as draft,
        serving(
            None, ca=of_draft.ca, drafts=[draft.address], mode="speculative", **security(tmp_path)
        ) as server,
    ):
        async with TargetClient(server.admin_address, credentials=operator) as client:
            await until(client, is_active)
            text = complete(server, TOKENS["clients"])
            assert len(text) == 60
            status = await client.pool_status()
            assert (status.links[0].state, status.hit_rate > 0) == ("active", True)
        for token in ("", TOKENS["links"]):
            assert refused(server, token) == 401
        without_token = ClientCredentials(of_operator, "", NAME)
        async with TargetClient(server.admin_address, credentials=without_token) as client:
            with pytest.raises(AccessError, match="no token of the role admin"):
                await client.pool_status()
        async with TargetClient(server.admin_address) as client:
            with pytest.raises(NotReadyError):
                await client.pool_status()

        for _ in range(2):
            # A request, as of a probe, finds the files; the next connection has the certificate.
            new = mount_certificate(tls, authority, *names)
            counted = server.metrics()
            assert ssl.get_server_certificate(("127.0.0.1", server.port)) == new
            assert counted['ssd_tls_certificate_expiry_timestamp_seconds{role="server"}'] > 0
        mount(tokens, TOKENS | {"clients": "another-token-of-clients"})
        assert refused(server, TOKENS["clients"]) == 401
        assert complete(server, "another-token-of-clients") == text
        async with TargetClient(server.admin_address, credentials=operator) as client:
            assert (await client.pool_status()).links[0].state == "active"
