"""Files of API keys."""

import hashlib
from pathlib import Path

import pytest

from ssd.errors import AccessError, SettingsError
from ssd_gateway.api_keys import ApiKeys, read_keys

HASH = hashlib.sha256(b"secret").hexdigest()


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    file = tmp_path / "keys"
    file.write_text(f"\n# all\nalice:{HASH}\n")
    loaded = ApiKeys(str(file))
    loaded.load()
    return loaded


def test_the_name_of_a_valid_key_is_returned(keys: ApiKeys) -> None:
    assert keys.check("Bearer secret") == "alice"
    assert keys.check("bearer  secret ") == "alice"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic secret", "Bearer \udcff", f"Bearer {HASH}"]
)
def test_other_headers_are_refused(keys: ApiKeys, header: str | None) -> None:
    with pytest.raises(AccessError):
        keys.check(header)


def test_without_a_file_no_key_is_needed() -> None:
    assert ApiKeys("").check(None) == ""


@pytest.mark.parametrize("content", ["", "# none", "alice:secret", f"alice {HASH}", HASH, "\0"])
def test_a_file_without_valid_lines_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(SettingsError, match="api_keys_file") as caught:
        read_keys(file)
    assert "secret" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        ApiKeys(str(tmp_path / "none")).load()
