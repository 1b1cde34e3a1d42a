"""What the operator presents to engines, from the folder of its setting ``credentials``."""

from pathlib import Path

from ssd.errors import SettingsError
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials, Reloaded, TlsFiles
from ssd_operator.children.objects import server_name
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.pod_state import Address
from ssd_operator.runtime import metrics

_FILES = ("ca.crt", "tls.crt", "tls.key", "token")


class EngineCredentials:
    """Credentials of calls to engines. Files that are added, changed or removed are read again.

    The token is sent only to pods that accept tokens, after their certificate has been checked:
    every user who may create a resource selects the image that receives the call.
    """

    def __init__(self, folder: str) -> None:
        """Read the files of a folder, each of which may be missing; without a folder none is read.

        Raises:
            SettingsError: there is no such folder, or a file is invalid.
        """
        if folder and not Path(folder).is_dir():
            raise SettingsError(f"credentials: {folder} is not a folder")
        paths = [str(Path(folder) / file) for file in _FILES] if folder else []
        self._credentials = Reloaded(paths, lambda: _read(paths))

    def of(self, key: Key, service: str, address: Address) -> ClientCredentials:
        """Return the credentials for a pod behind a Service of a resource."""
        if not address.is_tls:
            return NO_CREDENTIALS
        without_token, with_token = self._credentials.current()
        credentials = with_token if address.has_tokens else without_token
        return credentials.of_server(server_name(key[0], service))


def _read(paths: list[str]) -> tuple[ClientCredentials, ClientCredentials]:
    """Return credentials without and with the token, from the files that exist.

    A metric shows the end of the certificate.
    """
    ca, certificate, key, token = (
        path if Path(path).exists() else "" for path in paths or [""] * len(_FILES)
    )
    if not ca:
        # A call to a port with TLS then fails, and the status has the reason.
        metrics.show_certificate(None)
        return NO_CREDENTIALS, NO_CREDENTIALS
    tls = TlsFiles(ca=ca, certificate=certificate, key=key)
    without_token, with_token = ClientCredentials(tls), ClientCredentials(tls, token)
    # Calls may last for days: the metric reads a new certificate before the next call does.
    metrics.show_certificate((lambda: without_token.expires_at) if certificate else None)
    return without_token, with_token
