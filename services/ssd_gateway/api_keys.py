"""API keys: the hashes of a file, compared in constant time."""

import hashlib
import hmac
import re
from pathlib import Path

from ssd.errors import AccessError, SettingsError
from ssd.telemetry import get_logger

MAX_KEYS = 10_000
MAX_FILE_BYTES = 4 << 20
_LINE = re.compile(r"([\w.@-]{1,64}):([0-9a-f]{64})")
_log = get_logger(__name__)


class ApiKeys:
    """The keys that clients may use. Asyncio loop.

    The file is read again at the first request after it has changed. A file that cannot be read
    any more keeps the last keys valid: a rotation replaces a file in two steps.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._version: tuple[int, int, int] | None = None
        self._names: dict[bytes, str] = {}

    @property
    def are_required(self) -> bool:
        """Whether a request needs a key."""
        return self._path is not None

    def load(self) -> None:
        """Read the file at the start.

        Raises:
            SettingsError: the file cannot be read, or a line is not ``NAME:HASH``.
        """
        if self._path is not None:
            self._names, self._version = read_keys(self._path), _version(self._path)

    def check(self, authorization: str | None) -> str:
        """Return the name of the key in an ``Authorization`` header; empty if none is needed.

        Raises:
            AccessError: there is no key, or a wrong one.
        """
        if self._path is None:
            return ""
        self._reload(self._path)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AccessError("no API key; send the header 'Authorization: Bearer KEY'")
        found = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        # Compares with every key, so the time does not depend on which one matches.
        matches = [name for each, name in self._names.items() if hmac.compare_digest(each, found)]
        if not matches:
            raise AccessError("the API key is not valid")
        return matches[0]

    def _reload(self, path: Path) -> None:
        try:
            version = _version(path)
            if version == self._version:
                return
            self._names = read_keys(path)
        except (OSError, SettingsError) as error:
            _log.warning("api_keys_not_read", reason=str(error))
            return
        self._version = version
        _log.info("api_keys_read", keys=len(self._names))


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
    if not names or len(names) > MAX_KEYS:
        raise SettingsError(f"api_keys_file {path}: has {len(names)} keys, must have 1..{MAX_KEYS}")
    return names


def _version(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_ino, state.st_mtime_ns, state.st_size
