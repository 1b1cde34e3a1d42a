"""What the operator presents to engines: to which pods, and when files change."""

from pathlib import Path

import pytest
from tests.pki import Authority, put

from ssd.errors import SettingsError
from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import Address, address_of
from ssd_operator.runtime.engine_credentials import EngineCredentials

KEY = ("team-a", "demo")
PLAIN = Address("10.0.0.1", is_tls=False, has_tokens=True)
SECURE = Address("10.0.0.1", is_tls=True, has_tokens=True)
WITHOUT_TOKENS = Address("10.0.0.1", is_tls=True, has_tokens=False)
SENT = (("authorization", "Bearer token-of-the-operator"),)


def put_all(folder: Path) -> None:
    Authority().files(folder, "spiffe://ssd/ns/ssd/sa/ssd-operator")
    put(folder / "token", "token-of-the-operator")


def test_without_a_folder_calls_are_plain_text_without_a_token() -> None:
    for address in (PLAIN, SECURE):
        credentials = EngineCredentials("").of(KEY, "demo", address)
        assert credentials.certificates() is None
        assert credentials.metadata() == ()


def test_a_pod_with_tls_is_called_by_the_name_of_its_service(tmp_path: Path) -> None:
    put_all(tmp_path)
    secure = EngineCredentials(str(tmp_path)).of(KEY, "demo-draft", SECURE)
    pem = secure.certificates()
    assert pem is not None
    assert pem.key is not None
    assert secure._server_name == "demo-draft.team-a.svc"


def test_only_a_pod_with_tls_that_accepts_tokens_receives_the_token(tmp_path: Path) -> None:
    put_all(tmp_path)
    of = EngineCredentials(str(tmp_path)).of
    assert of(KEY, "demo", SECURE).metadata() == SENT
    assert of(KEY, "demo", WITHOUT_TOKENS).metadata() == ()
    plain = of(KEY, "demo", PLAIN)
    assert (plain.certificates(), plain.metadata()) == (None, ())


def test_without_an_authority_nobody_receives_the_token(tmp_path: Path) -> None:
    put(tmp_path / "token", "token-of-the-operator")
    assert EngineCredentials(str(tmp_path)).of(KEY, "demo", SECURE).metadata() == ()


@pytest.mark.parametrize("volumes", [(), ("ssd-tls",), ("ssd-tokens",), ("ssd-tls", "ssd-tokens")])
def test_the_volumes_of_a_pod_are_its_protocol(volumes: tuple[str, ...]) -> None:
    pod: Object = {
        "spec": {"volumes": [{"name": name} for name in ("tmp", *volumes)]},
        "status": {"podIP": "10.0.0.1"},
    }
    expected = Address("10.0.0.1", "ssd-tls" in volumes, "ssd-tokens" in volumes)
    assert address_of(pod) == expected


def test_each_file_may_be_missing(tmp_path: Path) -> None:
    put(tmp_path / "ca.crt", Authority().pem)
    secure = EngineCredentials(str(tmp_path)).of(KEY, "demo", SECURE)
    pem = secure.certificates()
    assert pem is not None
    assert pem.certificate is None
    assert secure.metadata() == ()


def test_files_that_are_added_later_are_used(tmp_path: Path) -> None:
    all_credentials = EngineCredentials(str(tmp_path))
    assert all_credentials.of(KEY, "demo", SECURE).certificates() is None
    put_all(tmp_path)
    secure = all_credentials.of(KEY, "demo", SECURE)
    pem = secure.certificates()
    assert pem is not None
    assert pem.certificate is not None
    assert secure.metadata() == SENT


def test_a_file_that_is_added_and_invalid_changes_nothing(tmp_path: Path) -> None:
    put_all(tmp_path)
    (tmp_path / "token").unlink()
    all_credentials = EngineCredentials(str(tmp_path))
    put(tmp_path / "token", "short")
    assert all_credentials.of(KEY, "demo", SECURE).certificates() is not None
    put(tmp_path / "token", "token-of-the-operator")
    assert all_credentials.of(KEY, "demo", SECURE).metadata() == SENT


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(SettingsError, match="/nowhere is not a folder"):
        EngineCredentials("/nowhere")
