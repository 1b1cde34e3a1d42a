"""Settings that protect ports and tokens."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.pki import Authority, put

from ssd.errors import SettingsError
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.credentials import ClientCredentials, TlsFiles
from ssd_draft.settings import DraftSettings
from ssd_gateway.gateway import credentials_of
from ssd_gateway.settings import GatewaySettings
from ssd_target.settings import TargetSettings

CLIENT = "token-of-a-client"


@pytest.fixture
def token(tmp_path: Path) -> Any:
    """Write a file of tokens; returns its path."""
    return lambda text: put(tmp_path / text.split("\n")[0], text)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: TargetSettings(host="0.0.0.0"), "every machine that reaches 0.0.0.0 could call"),
        (lambda: DraftSettings(host="::"), "set token_file or tls_client_ca, or allow_insecure"),
        (
            lambda: TargetSettings(host="10.0.0.1", tls_certificate="c", tls_key="k"),
            "every machine that reaches 10.0.0.1",
        ),
        (lambda: TargetSettings(tls_key="k"), "tls_certificate and tls_key: give both"),
        (lambda: TargetSettings(tls_client_ca="a"), "tls_client_ca needs tls_certificate"),
        (lambda: TargetSettings(admin_names=("a",)), "admin_names .* need tls_client_ca"),
        (
            lambda: DraftSettings(tls_certificate="c", tls_key="k", tls_client_ca="a"),
            "every certificate that tls_client_ca signed could open a link",
        ),
        (
            lambda: TargetSettings(drafts=("draft.svc:50052",), link_ca="a"),
            "link_server_name: links use the addresses behind the DNS names",
        ),
        (
            lambda: DraftSettings(host="0.0.0.0", token_file="t"),
            "callers of 0.0.0.0 would send their tokens in plain text",
        ),
        (
            lambda: TargetSettings(link_ca="a", channel="collective"),
            "channel collective is not encrypted",
        ),
        (
            lambda: DraftSettings(tls_certificate="c", tls_key="k", channel="collective"),
            "channel collective is not encrypted",
        ),
    ],
)
def test_settings_that_protect_less_than_they_seem_to_are_refused(make: Any, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        make()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "0.0.0.0", "allow_insecure": True},
        {"host": "0.0.0.0", "token_file": "t", "allow_insecure": True},
        {"host": "0.0.0.0", "token_file": "t", "tls_certificate": "c", "tls_key": "k"},
        {"host": "127.0.0.1", "token_file": "t"},
    ],
)
def test_protected_and_local_ports_need_no_permission(settings: dict[str, Any]) -> None:
    TargetSettings(**settings)


OTHERS = ("10.0.0.1:50051", "demo.svc:50051", "dns:///demo.svc:50051", "[2001:db8::1]:50051")
LOCAL = ("127.0.0.1:50051", "localhost:50051", "[::1]:50051", "dns:///localhost:50051")


def test_a_token_is_sent_to_other_machines_only_over_tls_or_with_permission(
    token: Any, tmp_path: Path
) -> None:
    plain = ClientCredentials(token_file=token(CLIENT))
    for address in OTHERS:
        for client in (TargetClient, DraftClient):
            with pytest.raises(SettingsError, match="the token would be sent to"):
                client(address, credentials=plain)
    for address in LOCAL:
        plain.check(address)
    tls = TlsFiles(ca=put(tmp_path / "ca.crt", Authority().pem))
    for credentials in (
        ClientCredentials(tls, token(CLIENT)),
        ClientCredentials(token_file=token(CLIENT), allow_insecure=True),
        ClientCredentials(),
    ):
        TargetClient(OTHERS[0], credentials=credentials)


def test_the_tokens_of_processes_are_not_sent_in_plain_text(token: Any) -> None:
    file = token(CLIENT)
    for allow in (False, True):
        target = TargetSettings(
            drafts=("127.0.0.1:1", "demo-draft:1"), link_token_file=file, allow_insecure=allow
        )
        gateway = GatewaySettings(
            targets=("127.0.0.1:1", "demo:1"), target_token_file=file, allow_insecure=allow
        )
        with contextlib.nullcontext() if allow else pytest.raises(SettingsError, match="demo-dr"):
            target.link_credentials()
        with contextlib.nullcontext() if allow else pytest.raises(SettingsError, match="demo:1"):
            credentials_of(gateway)
