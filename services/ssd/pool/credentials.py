"""What a target presents to its drafts, from its settings."""

from ssd.pool.settings import DraftsSettings
from ssd.rpc.credentials import ClientCredentials, TlsFiles


def link_credentials(settings: DraftsSettings) -> ClientCredentials:
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
