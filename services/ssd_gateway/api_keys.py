"""API keys: the hashes of a file, compared in constant time."""

import hashlib
import hmac
import re
from pathlib import Path

from ssd.errors import AccessError, SettingsError
from ssd.rpc.credentials import Reloaded

MAX_KEYS = 10_000
MAX_FILE_BYTES = 4 << 20
_LINE = re.compile(r"([\w.@-]{1,64}):([0-9a-f]{64})")


class ApiKeys:
    """The keys that clients may use. Asyncio loop.

    The file is read again at the first request after it has changed. If it cannot be read, or a
    line is malformed, the last keys stay valid. If it has no keys any more, none is valid.
    """

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            SettingsError: the file cannot be read, has no keys, or a line is not ``NAME:HASH``.
        """
        self._names: Reloaded[dict[bytes, str]] | None = None
        if path:
            self._names = Reloaded((path,), lambda: read_keys(Path(path)))
            if not self._names.current():
                raise SettingsError(f"api_keys_file {path}: has no keys")

    def check(self, authorization: str | None) -> str:
        """Return the name of the key in an ``Authorization`` header; empty if none is needed.

        The characters of the header are its bytes (Latin-1), as Starlette has them.

        Raises:
            AccessError: there is no key, or a wrong one.
        """
        if self._names is None:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip(" \t"):
            raise AccessError("no API key; send the header 'Authorization: Bearer KEY'")
        key_digest = hashlib.sha256(key.strip(" \t").encode("latin-1", "replace")).digest()
        # Compares with every key, so the time does not depend on which one matches.
        keys = self._names.current().items()
        matches = [name for digest, name in keys if hmac.compare_digest(digest, key_digest)]
        if not matches:
            raise AccessError("the API key is not valid")
        return matches[0]


def read_keys(path: Path) -> dict[bytes, str]:
    """Return the names of the keys of a file by their SHA-256; empty lines and ``#`` are skipped.

    Raises:
        SettingsError: the file cannot be read, is too large, or a line is not ``NAME:HASH``.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"api_keys_file {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"api_keys_file {path}: has over {MAX_FILE_BYTES} bytes")
    names: dict[bytes, str] = {}
    for number, raw in enumerate(content.decode(errors="replace").splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise SettingsError(
                f"api_keys_file {path}: line {number} is not NAME:HASH with the SHA-256 of the key "
                "in 64 lower-case hexadecimal digits"
            )
        names[bytes.fromhex(match[2])] = match[1]
    if len(names) > MAX_KEYS:
        raise SettingsError(f"api_keys_file {path}: has over {MAX_KEYS} keys")
    return names
