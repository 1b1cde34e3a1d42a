"""What a target presents to its drafts, from its settings."""

from collections.abc import Sequence
from typing import Protocol

from ssd.rpc.credentials import ClientCredentials, TlsFiles


class LinkSecurity(Protocol):
    """The settings of a target that concern the security of its links; see ``TargetSettings``."""

    @property
    def drafts(self) -> Sequence[str]:
        """Addresses."""

    @property
    def link_ca(self) -> str:
        """Certificates of the authorities of drafts; empty: links have no TLS."""

    @property
    def link_server_name(self) -> str:
        """Name in the certificates of drafts, in place of their addresses."""

    @property
    def link_token_file(self) -> str:
        """File of the token."""

    @property
    def tls_certificate(self) -> str:
        """Certificate of the target."""

    @property
    def tls_key(self) -> str:
        """Key of that certificate."""

    @property
    def allow_insecure(self) -> bool:
        """Whether the token may be sent to other machines in plain text."""


def link_credentials(settings: LinkSecurity) -> ClientCredentials:
    """Return what links present to drafts.

    Raises:
        SettingsError: a file is missing or invalid, or a token would be sent in plain text.
    """
    tls = None
    if settings.link_ca:
        tls = TlsFiles(
            certificate=settings.tls_certificate, key=settings.tls_key, ca=settings.link_ca
        )
    credentials = ClientCredentials(
        tls,
        settings.link_token_file,
        settings.link_server_name,
        allow_insecure=settings.allow_insecure,
    )
    for address in settings.drafts:
        credentials.check(address)
    return credentials
