"""Security of a process from its settings: certificates of its port, and roles of its callers."""

from typing import Literal

from ssd.engine_settings import EngineSettings
from ssd.rpc.access import Access, Role, Security
from ssd.rpc.credentials import AcceptedTokens, TlsFiles

_CALLERS = {"target": "client", "draft": "link"}
_ADMIN = "admin"
_ADMIN_METHODS = {
    "target": ("/ssd.v1.AdminService/",),
    "draft": ("/ssd.v1.SpeculationService/GetStatus", "/ssd.v1.SpeculationService/Drain"),
}


def security_of(settings: EngineSettings, process: Literal["target", "draft"]) -> Security:
    """Return the security of a process, and read its files.

    Raises:
        SettingsError: a file is missing or invalid.
    """
    tls = None
    if settings.tls_certificate:
        tls = TlsFiles(
            certificate=settings.tls_certificate,
            key=settings.tls_key,
            ca=settings.tls_client_ca,
        )
        tls.read()
    caller = role_of(_CALLERS[process], settings.token_file, settings.caller_names)
    admin = role_of(_ADMIN, settings.admin_token_file, settings.admin_names)
    others = {} if admin.is_open else dict.fromkeys(_ADMIN_METHODS[process], admin)
    return Security(tls=tls, access=Access(role=caller, others=others))


def role_of(name: str, token_file: str, names: tuple[str, ...]) -> Role:
    """Return the callers with a token of a file, or with a name in their certificate."""
    tokens = AcceptedTokens(token_file) if token_file else None
    return Role(name=name, tokens=tokens, names=frozenset(names))
