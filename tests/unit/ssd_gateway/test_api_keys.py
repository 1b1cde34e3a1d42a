"""Files of API keys."""

import hashlib
from pathlib import Path

import pytest

from ssd.errors import AccessError, SettingsError
from ssd_gateway.api_keys import ApiKeys

HASH = hashlib.sha256(b"secret").hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"\n# all\nalice:{HASH}\n")
    return path


@pytest.fixture
def keys(file: Path) -> ApiKeys:
    return ApiKeys(str(file))


def test_the_name_of_a_valid_key_is_returned(keys: ApiKeys) -> None:
    assert keys.check("Bearer secret") == "alice"
    assert keys.check("bearer  secret ") == "alice"


@pytest.mark.parametrize("key", ["clé", "ключ", "a\xa0", "à"])
def test_a_key_may_have_any_characters(file: Path, key: str) -> None:
    file.write_text(f"bob:{hashlib.sha256(key.encode()).hexdigest()}")
    sent = f"Bearer {key}".encode().decode("latin-1")
    assert ApiKeys(str(file)).check(sent) == "bob"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic secret", "Bearer \udcff", f"Bearer {HASH}"]
)
def test_other_headers_are_refused(keys: ApiKeys, header: str | None) -> None:
    with pytest.raises(AccessError):
        keys.check(header)


def test_without_a_file_no_key_is_needed() -> None:
    assert ApiKeys("").check(None) == ""


@pytest.mark.parametrize("content", ["alice:secret", f"alice {HASH}", HASH, "\0"])
def test_a_file_with_a_malformed_line_is_refused(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(SettingsError, match="api_keys_file") as caught:
        ApiKeys(str(file))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "# none"])
def test_a_file_without_keys_is_refused_at_the_start(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(SettingsError, match="no keys"):
        ApiKeys(str(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        ApiKeys(str(tmp_path / "none"))


def test_a_changed_file_replaces_the_keys(keys: ApiKeys, file: Path) -> None:
    file.write_text(f"bob:{hashlib.sha256(b'second key').hexdigest()}")
    assert keys.check("Bearer second key") == "bob"
    with pytest.raises(AccessError):
        keys.check("Bearer secret")


@pytest.mark.parametrize("content", ["", "# none"])
def test_no_key_is_valid_after_all_are_removed(keys: ApiKeys, file: Path, content: str) -> None:
    assert keys.check("Bearer secret") == "alice"
    file.write_text(content)
    with pytest.raises(AccessError):
        keys.check("Bearer secret")
