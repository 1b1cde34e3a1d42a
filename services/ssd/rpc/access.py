"""Who may call: a role for each service, with its tokens and the names of its certificates.

A caller has a role if it presents one of the role's tokens, if there are any, and a certificate
with one of the role's names, if there are any. ``grpc.health.v1`` is open to all callers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ssd.errors import AccessError, NotAllowedError
from ssd.rpc.credentials import AcceptedTokens, TlsFiles, bearer_token

_OPEN_SERVICE = "/grpc.health.v1.Health/"
_NAMES_KEY = "x509_subject_alternative_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Callers with the same rights; without tokens and names, all callers."""

    name: str
    """Name in messages, for example ``client``."""
    tokens: AcceptedTokens | None = None
    names: frozenset[str] = frozenset()
    """Subject alternative names of certificates. A caller needs one of them."""

    @property
    def is_open(self) -> bool:
        """Whether all callers have the role."""
        return self.tokens is None and not self.names


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The role that a call needs."""

    role: Role = Role(name="caller")
    """Role of all methods that have no other one."""
    others: Mapping[str, Role] = field(default_factory=dict)
    """Roles by the full name of a method, or its beginning: ``/ssd.v1.AdminService/``."""

    def check(self, method: str, context: Any) -> None:
        """Refuse a caller that does not have the role of a method.

        Raises:
            AccessError: the token is missing or wrong.
            NotAllowedError: the token or the certificate has another role.
        """
        if method.startswith(_OPEN_SERVICE):
            return
        role = next(
            (other for prefix, other in self.others.items() if method.startswith(prefix)), self.role
        )
        if role.tokens is not None:
            token = bearer_token(context.invocation_metadata() or ())
            if not role.tokens.accept(token):
                raise self._wrong_token(role, token)
        if role.names and not role.names & _names(context):
            raise NotAllowedError(
                f"the certificate has none of the names of the role {role.name}: "
                + ", ".join(sorted(role.names))
            )

    def _wrong_token(self, role: Role, token: str) -> AccessError:
        if not token:
            return AccessError(
                f"no token of the role {role.name}; send the metadata 'authorization: Bearer TOKEN'"
            )
        for held in (self.role, *self.others.values()):
            if held.tokens is not None and held.tokens.accept(token):
                return NotAllowedError(f"the token has the role {held.name}, needed is {role.name}")
        return AccessError(f"the token is not one of the role {role.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """How a server protects its connections, and who may call it."""

    tls: TlsFiles | None = None
    """None: plain text."""
    access: Access = field(default_factory=Access)


OPEN = Security()
"""Plain text, and every caller may call every method."""


def _names(context: Any) -> frozenset[str]:
    """Return the names of the caller's certificate; none without mutual TLS."""
    names = context.auth_context().get(_NAMES_KEY) or ()
    return frozenset(name.decode(errors="replace") for name in names)
