"""What the operator presents to engines, from the folder of its setting ``credentials``."""

from pathlib import Path

from ssd.errors import SettingsError
from ssd.rpc.credentials import ClientCredentials, TlsFiles
from ssd_operator.children.names import server_name
from ssd_operator.observe.cluster import Key


class EngineCredentials:
    """Credentials of calls to engines. The files are read again when they change."""

    def __init__(self, folder: str) -> None:
        """Read the files.

        Args:
            folder: with ca.crt, tls.crt, tls.key and token, each of which may be missing; empty
                for none.

        Raises:
            SettingsError: there is no such folder, or a file is invalid.
        """
        if folder and not Path(folder).is_dir():
            raise SettingsError(f"credentials: {folder} is not a folder")
        token = _file(folder, "token")
        tls = TlsFiles(
            ca=_file(folder, "ca.crt"),
            certificate=_file(folder, "tls.crt"),
            key=_file(folder, "tls.key"),
        )
        self._plain = ClientCredentials(token_file=token)
        # Without ca.crt a call to a port with TLS fails, and the status has the reason.
        self._secure = ClientCredentials(tls, token) if tls.ca else self._plain

    def of(self, key: Key, service: str, *, is_tls: bool) -> ClientCredentials:
        """Return the credentials for the pods behind a Service of a resource."""
        return self._secure.of_server(server_name(key[0], service)) if is_tls else self._plain


def _file(folder: str, name: str) -> str:
    path = Path(folder) / name
    return str(path) if folder and path.exists() else ""
