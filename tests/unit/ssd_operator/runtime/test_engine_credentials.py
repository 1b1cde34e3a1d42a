"""What the operator presents to engines: to which pods, and when files change."""

from pathlib import Path
from typing import Any

import pytest
from tests.pki import Authority, put

from ssd.errors import SettingsError
from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import Address, address_of
from ssd_operator.runtime import metrics
from ssd_operator.runtime.engine_client import EngineCredentials

KEY = ("team-a", "demo")
PLAIN = Address("10.0.0.1", is_tls=False, has_tokens=True)
SECURE = Address("10.0.0.1", is_tls=True, has_tokens=True)
WITHOUT_TOKENS = Address("10.0.0.1", is_tls=True, has_tokens=False)
NOTHING = (False, False, ())
ALL = (True, True, (("authorization", "Bearer token-of-the-operator"),))


def presented(credentials: EngineCredentials, address: Address = SECURE) -> tuple[bool, bool, Any]:
    """Whether a call checks the pod's certificate and presents one, and its metadata."""
    call = credentials.of(KEY, "demo", address)
    pem = call.certificates()
    return pem is not None, pem is not None and pem.certificate is not None, call.metadata()


def put_all(folder: Path) -> EngineCredentials:
    Authority().files(folder, "spiffe://ssd/ns/ssd/sa/ssd-operator")
    put(folder / "token", "token-of-the-operator")
    return EngineCredentials(str(folder))


@pytest.mark.parametrize("address", [PLAIN, SECURE])
def test_without_a_folder_calls_are_plain_text_without_a_token(address: Address) -> None:
    assert presented(EngineCredentials(""), address) == NOTHING


def test_a_pod_with_tls_is_called_by_the_name_of_its_service(tmp_path: Path) -> None:
    secure = put_all(tmp_path).of(KEY, "demo-draft", SECURE)
    assert secure._server_name == "demo-draft.team-a.svc"


def test_only_a_pod_with_tls_that_accepts_tokens_receives_the_token(tmp_path: Path) -> None:
    credentials = put_all(tmp_path)
    assert presented(credentials, SECURE) == ALL
    assert presented(credentials, WITHOUT_TOKENS) == (True, True, ())
    assert presented(credentials, PLAIN) == NOTHING


def test_without_an_authority_nobody_receives_the_token(tmp_path: Path) -> None:
    put(tmp_path / "token", "token-of-the-operator")
    assert presented(EngineCredentials(str(tmp_path))) == NOTHING


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
    assert presented(EngineCredentials(str(tmp_path))) == (True, False, ())


def test_files_that_are_added_later_are_used(tmp_path: Path) -> None:
    credentials = EngineCredentials(str(tmp_path))
    assert presented(credentials) == NOTHING
    put_all(tmp_path)
    assert presented(credentials) == ALL


def test_a_file_that_is_added_and_invalid_changes_nothing(tmp_path: Path) -> None:
    put_all(tmp_path)
    (tmp_path / "token").unlink()
    credentials = EngineCredentials(str(tmp_path))
    put(tmp_path / "token", "short")
    assert presented(credentials) == (True, True, ())
    put(tmp_path / "token", "token-of-the-operator")
    assert presented(credentials) == ALL


def shown_expiry() -> float | None:
    labels = {"role": "operator"}
    name = "ssd_tls_certificate_expiry_timestamp_seconds"
    return metrics.REGISTRY.get_sample_value(name, labels)


def test_a_metric_has_the_end_of_the_certificate_also_of_a_new_one(tmp_path: Path) -> None:
    credentials = put_all(tmp_path)
    assert shown_expiry() == credentials.of(KEY, "demo", SECURE).expires_at
    newer = Authority()
    newer.days = 9
    files = newer.files(tmp_path, "spiffe://ssd/ns/ssd/sa/ssd-operator")
    assert shown_expiry() == files.read().expires_at


def test_no_metric_has_the_end_of_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    credentials = put_all(tmp_path)
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).unlink()
    presented(credentials)
    assert shown_expiry() is None
    put_all(tmp_path)
    presented(credentials)
    assert shown_expiry() is not None
    EngineCredentials("")
    assert shown_expiry() is None


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(SettingsError, match="/nowhere is not a folder"):
        EngineCredentials("/nowhere")
