"""What the operator presents to engines, and when it uses TLS."""

from pathlib import Path

import pytest
from tests.pki import Authority, put

from ssd.errors import SettingsError
from ssd_operator.runtime.engine_credentials import EngineCredentials

KEY = ("team-a", "demo")


def test_without_a_folder_calls_are_plain_text_without_a_token() -> None:
    credentials = EngineCredentials("").of(KEY, "demo", is_tls=False)
    assert credentials.certificates() is None
    assert credentials.metadata() == ()


def test_a_pod_with_tls_is_called_by_the_name_of_its_service(tmp_path: Path) -> None:
    Authority().files(tmp_path, "spiffe://ssd/ns/ssd/sa/ssd-operator")
    put(tmp_path / "token", "token-of-the-operator")
    all_credentials = EngineCredentials(str(tmp_path))
    plain = all_credentials.of(KEY, "demo", is_tls=False)
    secure = all_credentials.of(KEY, "demo-draft", is_tls=True)
    assert plain.certificates() is None
    pem = secure.certificates()
    assert pem is not None
    assert pem.key is not None
    assert secure._server_name == "demo-draft.team-a.svc"
    sent = (("authorization", "Bearer token-of-the-operator"),)
    assert (plain.metadata(), secure.metadata()) == (sent, sent)


def test_each_file_may_be_missing(tmp_path: Path) -> None:
    put(tmp_path / "ca.crt", Authority().pem)
    secure = EngineCredentials(str(tmp_path)).of(KEY, "demo", is_tls=True)
    pem = secure.certificates()
    assert pem is not None
    assert pem.certificate is None
    assert secure.metadata() == ()


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(SettingsError, match="/nowhere is not a folder"):
        EngineCredentials("/nowhere")
