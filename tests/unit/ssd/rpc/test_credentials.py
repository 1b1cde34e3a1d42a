"""Files of certificates and tokens: what is accepted, and what happens when they change."""

from codecs import BOM_UTF8
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from tests.pki import Authority, put

from ssd.errors import SettingsError
from ssd.observability.metrics import TLS_CERTIFICATE_EXPIRY
from ssd.rpc.credentials import (
    AcceptedTokens,
    ClientCredentials,
    Reloaded,
    TlsFiles,
    bearer_token,
    read_tokens,
    server_credentials,
)

ONE, TWO = "first-token-of-16", "second-token-of-16"


def test_tokens_are_accepted_until_the_file_changes(tmp_path: Path) -> None:
    path = put(tmp_path / "tokens", f"{ONE}\n\n{TWO}\n")
    tokens = AcceptedTokens(path)
    assert [tokens.accept(each) for each in (ONE, TWO, "", ONE[:-1], ONE + "x")] == [
        *(True, True, False, False, False)
    ]
    put(Path(path), TWO)
    assert [tokens.accept(each) for each in (ONE, TWO)] == [False, True]
    put(Path(path), "")
    assert not tokens.accept(TWO), "an empty file accepts nobody"


def test_a_change_that_cannot_be_read_keeps_the_tokens_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    tokens = AcceptedTokens(put(path, ONE))
    for change in (lambda: put(path, "too short"), path.unlink):
        caplog.clear()
        change()
        assert tokens.accept(ONE)
        assert tokens.accept(ONE)
        assert caplog.text.count("credentials_not_reloaded") == 1
        assert "too short" not in caplog.text
    put(path, TWO)
    assert [tokens.accept(each) for each in (ONE, TWO)] == [False, True]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"short", "line 1 is not a token: it must have 16 to 4096 characters without blanks"),
        (b"one-token-of-sixteen\nwith a blank in the token", "line 2 is not a token"),
        (b"x" * 4097, "line 1 is not a token"),
        ("ein-schlüssel-mit-umlaut".encode(), "printable ASCII"),
        (b"x" * (1 << 20) + b"x", "has more than 1048576 bytes"),
        (b"a-token-of-sixteen\n" * 1025, "has 1025 tokens, allowed are 1024"),
    ],
)
def test_a_file_that_contains_no_tokens_is_refused_without_its_content(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = put(tmp_path / "tokens", content)
    with pytest.raises(SettingsError, match=problem) as caught:
        read_tokens(path)
    assert content.decode(errors="replace")[:9] not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for make in (AcceptedTokens, lambda path: ClientCredentials(token_file=path)):
        with pytest.raises(SettingsError, match="absent: No such file"):
            make(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer abc ", "abc"),
        ("Basic abc", ""),
        ("Bearer", ""),
        ("abc", ""),
        (b"Bearer abc", ""),
    ],
)
def test_the_token_of_a_call_is_that_of_the_scheme_bearer(header: str | bytes, token: str) -> None:
    assert bearer_token([("other", "x"), ("authorization", header)]) == token
    assert bearer_token([]) == ""


def test_a_client_sends_the_first_token_of_its_file(tmp_path: Path) -> None:
    path = put(tmp_path / "token", f"\n{ONE}\n{TWO}\n")
    client = ClientCredentials(token_file=path)
    assert client.metadata() == (("authorization", f"Bearer {ONE}"),)
    put(Path(path), TWO)
    assert client.metadata() == (("authorization", f"Bearer {TWO}"),)
    put(Path(path), "")
    assert client.metadata() == (("authorization", f"Bearer {TWO}"),), "the last one stays"


def test_certificate_and_key_may_be_replaced_one_after_the_other(tmp_path: Path) -> None:
    authority = Authority()
    files = authority.files(tmp_path, "localhost")
    certificates = Reloaded(files.paths, files.read)
    old = certificates.current()
    assert certificates.current() is old
    certificate, key = authority.issue("localhost")
    put(Path(files.certificate), certificate)
    assert certificates.current() is old, "the key does not belong to the new certificate"
    put(Path(files.key), key)
    new = certificates.current()
    assert (new.certificate, new.key) == (certificate, key)
    assert certificates.current() is new


COMMENT = "# Főtanúsítvány\n"


@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-2"])
def test_the_file_of_a_ca_may_have_comments_in_any_language(tmp_path: Path, encoding: str) -> None:
    old, new = Authority().pem, Authority().pem
    path = tmp_path / "ca.crt"
    client = ClientCredentials(TlsFiles(ca=put(path, old)))
    commented = COMMENT.encode(encoding) + new + COMMENT.encode(encoding)
    put(path, commented)
    pem = client.certificates()
    assert pem is not None
    assert pem.ca == commented


def test_a_byte_order_mark_hides_no_certificate(tmp_path: Path) -> None:
    both = Authority().pem + Authority().pem
    pem = TlsFiles(ca=put(tmp_path / "ca.crt", BOM_UTF8 + both)).read()
    assert pem.ca == both


def test_other_characters_inside_a_certificate_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority().pem
    path = tmp_path / "ca.crt"
    client = ClientCredentials(TlsFiles(ca=put(path, authority)))
    put(path, authority.replace(b"\nM", "\nŰM".encode()))
    pem = client.certificates()
    assert pem is not None
    assert pem.ca == authority
    assert "credentials_not_reloaded" in caplog.text


def test_the_metric_has_the_end_of_the_certificate_that_is_in_use(tmp_path: Path) -> None:
    def days_left() -> float:
        labels = {"role": "server"}
        expiry = REGISTRY.get_sample_value("ssd_tls_certificate_expiry_timestamp_seconds", labels)
        assert expiry is not None
        return (expiry - datetime.now(UTC).timestamp()) / 86_400

    authority = Authority()
    files = replace(authority.files(tmp_path, "localhost"), ca="")
    server_credentials(files)
    assert days_left() == pytest.approx(1, abs=0.01)
    stored = TLS_CERTIFICATE_EXPIRY.labels(role="server")._value.get()
    assert stored == pytest.approx(datetime.now(UTC).timestamp() + 86_400, abs=60), (
        "what a process writes whose metrics another one serves"
    )
    authority.days = 90
    authority.files(tmp_path, "localhost")
    assert days_left() == pytest.approx(90, abs=0.01)


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "value"
    put(path, "1")

    def read() -> str:
        value = path.read_text()
        if value == "2":
            put(path, "3")
        return value

    found = Reloaded((str(path),), read)
    put(path, "2")
    assert [found.current(), found.current()] == ["1", "3"]


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    authority, other = Authority(), Authority()
    files = authority.files(tmp_path / "one", "localhost")
    others = other.files(tmp_path / "two", "localhost")
    with pytest.raises(SettingsError, match=r"are not a certificate and its key: .*MISMATCH"):
        TlsFiles(certificate=files.certificate, key=others.key).read()
    with pytest.raises(SettingsError, match="needs a certificate and its key, found only"):
        TlsFiles(certificate=files.certificate).read()
    text = put(tmp_path / "text", "no certificate")
    with pytest.raises(SettingsError, match="are not a certificate and its key"):
        TlsFiles(certificate=text, key=files.key).read()
    with pytest.raises(SettingsError, match="text contains no certificates"):
        TlsFiles(ca=text).read()
    with pytest.raises(SettingsError, match="give the file of the servers' CA too"):
        ClientCredentials(TlsFiles(certificate=files.certificate, key=files.key))


def test_a_key_never_appears_in_a_representation(tmp_path: Path) -> None:
    files = Authority().files(tmp_path, "localhost")
    assert "PRIVATE" not in repr(files.read())
