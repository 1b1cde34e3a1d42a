"""Credentials of gRPC from files: certificates and bearer tokens, read again when they change.

*Decision*: one mechanism for all files. Each use compares the identity, size and time of the files
with those of the last reading, and reads them again after a change. *Because* connections and calls
are rare, a ``stat`` takes microseconds, and the kubelet replaces the files of a Secret at any time.
*Not chosen*: a thread that watches files; gRPC's own certificate providers, which its Python
package does not have.
"""

import copy
import hashlib
import hmac
import ssl
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from ssd.errors import SettingsError
from ssd.observability import log, metrics
from ssd.rpc.certificate import expiry_of
from ssd.settings import is_local

AUTHORIZATION_KEY = "authorization"
_SCHEME = "Bearer "
MAX_FILE_BYTES = 1 << 20
MIN_TOKEN_CHARACTERS = 16
MAX_TOKEN_CHARACTERS = 4096
MAX_TOKENS = 1024
"""Maximum number of tokens in a file: each call is compared with all of them."""

_log = log.get_logger(__name__)
Value = TypeVar("Value")
_Signature = tuple[tuple[int, int, int, int] | None, ...]


class Reloaded(Generic[Value]):
    """A value that files contain. Any thread.

    If the files cannot be read after a change, the last value stays and the cause is logged once: a
    certificate and its key may be replaced one after the other.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], Value]) -> None:
        """Read the files.

        Args:
            paths: of the files.
            read: reads and checks them; raises ``SettingsError``.

        Raises:
            SettingsError: a file is missing or invalid.
        """
        self._paths = tuple(map(Path, paths))
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._value = read()

    def current(self) -> Value:
        """Return the value of the files: the same object until they change."""
        with self._lock:
            now = self._signature()
            if now != self._seen:
                self._seen = now
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            value = self._read()
        except SettingsError as error:
            _log.warning("credentials_not_reloaded", reason=str(error))
            return
        # Files that changed meanwhile are read again at the next use.
        if self._signature() == self._seen:
            self._value = value
            _log.info("credentials_reloaded", files=", ".join(map(str, self._paths)))

    def _signature(self) -> _Signature:
        """Return what changes with the files; None for one that is missing."""
        return tuple(map(_identity, self._paths))


def _identity(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one end of TLS; empty for none."""

    certificate: str = ""
    """Certificate chain of this end."""
    key: str = ""
    """Private key of the certificate, without a password."""
    ca: str = ""
    """Certificates of the authorities that sign certificates of the other end."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that are given."""
        return tuple(filter(None, (self.certificate, self.key, self.ca)))

    def read(self) -> "Pem":
        """Read and check the files.

        Raises:
            SettingsError: a file is missing or not PEM, or the key is not that of the certificate.
        """
        if bool(self.certificate) != bool(self.key):
            raise SettingsError(
                f"TLS needs a certificate and its key, found only {self.certificate or self.key}"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        paths = self.certificate, self.key, self.ca
        certificate, key, ca = (_content(path) if path else None for path in paths)
        expires_at = 0.0
        try:
            if self.certificate:
                # Without a password, OpenSSL would ask for one on the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
                assert certificate is not None
                expires_at = expiry_of(certificate)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{self.certificate} and {self.key} are not a certificate and its key: {error}"
            ) from error
        try:
            if ca is not None:
                context.load_verify_locations(cadata=_ascii(ca))
        except (OSError, ValueError) as error:
            raise SettingsError(f"{self.ca} contains no certificates: {error}") from error
        return Pem(certificate, key, ca, expires_at)


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of ``TlsFiles``; None for a file that is not given."""

    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None
    expires_at: float = 0.0
    """End of the certificate's validity, in seconds since the epoch; 0 without a certificate."""


def _ascii(pem: bytes) -> str:
    """Return PEM in which other characters than ASCII are question marks.

    ``ssl`` refuses such characters with a ``TypeError``. Comments between certificates may have
    them. Inside a certificate, a question mark is an error.
    """
    return pem.decode("ascii", errors="replace").replace("\N{REPLACEMENT CHARACTER}", "?")


def _content(path: str) -> bytes:
    """Return the bytes of a file.

    Raises:
        SettingsError: it cannot be read, or is too long.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    # It would hide the first certificate.
    return content.removeprefix(BOM_UTF8)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials of a server whose new connections use the current files.

    With ``files.ca``, callers need a certificate that it signed (mutual TLS).

    Raises:
        SettingsError: a file is missing or invalid.
    """
    certificates = Reloaded(files.paths, files.read)
    used = certificates.current()
    expiry = metrics.TLS_CERTIFICATE_EXPIRY.labels(role="server")
    # The value of a process whose metrics another one serves, which calls no function.
    expiry.set(used.expires_at)
    expiry.set_function(lambda: certificates.current().expires_at)

    def fetch() -> Any:
        # A thread of gRPC, before each handshake. None keeps the certificates.
        nonlocal used
        current = certificates.current()
        if current is used:
            return None
        used = current
        expiry.set(current.expires_at)
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), fetch, require_client_authentication=bool(files.ca)
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.certificate is not None
    pairs = [(pem.key, pem.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=pem.ca)


def read_tokens(path: str) -> tuple[str, ...]:
    """Return the tokens of a file, one a line; empty lines do not count.

    Raises:
        SettingsError: the file cannot be read, or a line is not a token. The message contains no
            token.
    """
    try:
        lines = [line.strip() for line in _content(path).decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: tokens are printable ASCII characters") from error
    tokens = tuple(filter(None, lines))
    if len(tokens) > MAX_TOKENS:
        raise SettingsError(f"{path} has {len(tokens)} tokens, allowed are {MAX_TOKENS}")
    for number, token in enumerate(lines, start=1):
        is_plain = token.isprintable() and " " not in token
        if token and not (is_plain and MIN_TOKEN_CHARACTERS <= len(token) <= MAX_TOKEN_CHARACTERS):
            raise SettingsError(
                f"{path}: line {number} is not a token: it must have {MIN_TOKEN_CHARACTERS} to "
                f"{MAX_TOKEN_CHARACTERS} characters without blanks"
            )
    return tokens


class AcceptedTokens:
    """The tokens of a file that callers may present, of which only hashes are kept. Any thread."""

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            SettingsError: it cannot be read, or a line is not a token.
        """
        self._digests = Reloaded((path,), lambda: tuple(map(_digest, read_tokens(path))))

    def accept(self, token: str) -> bool:
        """Whether the file contains a token. The time does not depend on which one, or where."""
        token_digest, is_accepted = _digest(token), False
        for digest in self._digests.current():
            is_accepted |= hmac.compare_digest(token_digest, digest)
        return is_accepted


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def bearer_token(metadata: Collection[tuple[str, str | bytes]]) -> str:
    """Return the token of a call; empty if it has none."""
    header = dict(metadata).get(AUTHORIZATION_KEY, "")
    if isinstance(header, str) and header[: len(_SCHEME)].lower() == _SCHEME.lower():
        return header[len(_SCHEME) :].strip()
    return ""


class ClientCredentials:
    """What a client presents, and which servers it accepts. Any thread.

    Without ``tls.ca`` connections are plain text. One object serves many clients.
    """

    def __init__(
        self,
        tls: TlsFiles | None = None,
        token_file: str = "",
        server_name: str = "",
        *,
        allow_insecure: bool = False,
    ) -> None:
        """Read the files.

        Args:
            tls: certificates; None for plain text.
            token_file: the first line is the token of each call; empty for none.
            server_name: name in the certificates of servers; empty for the host of the address.
            allow_insecure: without TLS, send the token to other machines too.

        Raises:
            SettingsError: a file is missing or invalid.
        """
        if tls is not None and not tls.ca:
            raise SettingsError(
                "a client certificate needs TLS: give the file of the servers' CA too"
                if tls.paths
                else "TLS needs the file of the servers' CA"
            )
        self._tls = Reloaded(tls.paths, tls.read) if tls is not None else None
        self._tokens = (
            Reloaded((token_file,), lambda: _first_token(token_file)) if token_file else None
        )
        self._server_name = server_name
        self._allow_insecure = allow_insecure

    def check(self, address: str) -> None:
        """Check that a server at ``host:port`` may receive the token.

        Raises:
            SettingsError: it is on another machine, and connections are plain text.
        """
        is_plain = self._tokens is not None and self._tls is None
        if is_plain and not self._allow_insecure and not is_local(address):
            raise SettingsError(
                f"the token would be sent to {address} in plain text: give the file of the "
                "servers' CA, or allow insecure connections if the network protects them"
            )

    def of_server(self, name: str) -> "ClientCredentials":
        """Return the same credentials for servers with another name in their certificates."""
        other = copy.copy(self)
        other._server_name = name  # noqa: SLF001 - an object of this class
        return other

    def certificates(self) -> Pem | None:
        """Return the certificates of new connections: the same object until the files change."""
        return self._tls.current() if self._tls is not None else None

    @property
    def expires_at(self) -> float:
        """End of the validity of the client's certificate, as in ``Pem``."""
        pem = self.certificates()
        return pem.expires_at if pem is not None else 0.0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call."""
        if self._tokens is None:
            return ()
        return ((AUTHORIZATION_KEY, _SCHEME + self._tokens.current()),)

    def open_channel(
        self, endpoint: str, options: Sequence[tuple[str, int | str]]
    ) -> grpc.aio.Channel:
        """Return a channel to an endpoint; it connects at the first call."""
        pem = self.certificates()
        if pem is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        if self._server_name:
            options = (*options, ("grpc.ssl_target_name_override", self._server_name))
        secure = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        return grpc.aio.secure_channel(endpoint, secure, options=options)


def _first_token(path: str) -> str:
    tokens = read_tokens(path)
    if not tokens:
        raise SettingsError(f"{path} contains no token")
    return tokens[0]


NO_CREDENTIALS = ClientCredentials()
"""Plain text without a token."""
