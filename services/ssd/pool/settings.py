"""The settings of a target that concern its drafts, with any engine."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from ssd.addresses import check_address
from ssd.rpc.codec import BackupName, SpeculationChange

if TYPE_CHECKING:
    from ssd.rpc.credentials import ClientCredentials


# It has no slots: a class cannot have two bases with slots.
@dataclass(frozen=True, kw_only=True)
class DraftsSettings:
    """Base of the settings of a target; its first four fields are also in ``EngineSettings``."""

    tls_certificate: str = ""
    """PEM file of the certificate chain of the gRPC port; empty for plain text. A target also
    presents it to its drafts. All files of certificates and tokens are read again when they
    change."""
    tls_key: str = ""
    """PEM file of the private key of ``tls_certificate``."""
    allow_insecure: bool = False
    """Listen on an address that other machines reach although callers need neither a token nor a
    certificate, and exchange tokens with other machines in plain text."""
    branches: int = field(default=24, metadata={"min": 1, "max": 128})
    """Largest number of branches of an outcome table (N). Target and drafts need the same value."""
    drafts: tuple[str, ...] = ()
    """Addresses ``host:port`` of drafts. A DNS name is resolved every 2 s and stands for all of its
    addresses. IP addresses and ``localhost`` are not resolved. ``dns:///host:port`` is always a
    DNS name."""
    link_ca: str = ""
    """PEM file of the authorities of the drafts' certificates; empty: links are plain text. Needs
    the channel ``grpc``: the others are not encrypted."""
    link_server_name: str = ""
    """Name in the certificates of the drafts. Needed with ``link_ca`` if ``drafts`` has DNS names,
    because links use their addresses. Empty: the host of the address."""
    link_token_file: str = ""
    """File whose first line is the token that drafts accept from targets."""
    draft_deadline_ms: float = field(default=20.0, metadata={"min": 0.0, "max": 60_000.0})
    """Table deadline: maximum time that a round waits for its tables, in milliseconds. Late rows
    use their backup."""
    adaptive_deadline: bool = True
    """Wait for another column of a table only while it is expected to add more tokens per second
    than the next round. Off: wait for whole tables until the table deadline."""
    circuit_breaker: bool = True
    """Suspend a link for 5 to 60 s if it sends no table for three rounds and three deadlines."""
    backup: BackupName = "ngram"
    """Proposal after a miss and in a text that repeats itself, and continuation of a table with few
    columns: no tokens, or the tokens that follow the longest suffix match."""

    def __post_init__(self) -> None:
        for address in self.drafts:
            check_address("drafts", address)

    @property
    def deadline_seconds(self) -> float:
        """The table deadline in seconds."""
        return self.draft_deadline_ms / 1000

    def link_credentials(self) -> "ClientCredentials":
        """Return what links present to drafts.

        Raises:
            SettingsError: a file is missing or invalid, or a token would be sent in plain text.
        """
        # Imports gRPC, which settings alone do not need.
        from ssd.rpc.credentials import ClientCredentials, TlsFiles  # noqa: PLC0415

        tls = None
        if self.link_ca:
            tls = TlsFiles(certificate=self.tls_certificate, key=self.tls_key, ca=self.link_ca)
        credentials = ClientCredentials(
            tls, self.link_token_file, self.link_server_name, allow_insecure=self.allow_insecure
        )
        for address in self.drafts:
            credentials.check(address)
        return credentials

    def changed(self, change: SpeculationChange) -> Self:
        """Return the settings after a change; None keeps a value. Mode and fan-out are not here."""
        return replace(
            self,
            backup=change.backup or self.backup,
            draft_deadline_ms=change.draft_deadline_ms or self.draft_deadline_ms,
        )
