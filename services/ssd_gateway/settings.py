"""Settings of the gateway process. Sources and precedence: ``ssd.settings``."""

from dataclasses import dataclass, field
from typing import Literal

from ssd.addresses import check_address, is_literal
from ssd.errors import SettingsError
from ssd.settings import TERMINATION_LOG, is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of ``python -m ssd_gateway``."""

    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` or ``::`` for all addresses, IPv4 and IPv6."""
    port: int = field(default=8000, metadata={"min": 0, "max": 65535})
    """HTTP port; with 0 the system selects one, which is logged."""
    targets: tuple[str, ...] = ("127.0.0.1:50051",)
    """Addresses ``host:port`` of targets. A DNS name is resolved every 2 s and stands for all of
    its addresses, or the last ones while it has none; ``dns:///host:port`` is always a DNS name."""
    api_keys_file: str = ""
    """File of API keys, one ``NAME:HASH`` per line: HASH is the SHA-256 of the key, hexadecimal.
    It is read again when it changes. Empty: requests need no key."""
    allow_insecure: bool = False
    """Listen on an address that other machines reach although requests need no key, accept any
    ``Host`` on the loopback, and send the token to targets on other machines in plain text."""
    playground: bool = True
    """Serve the playground at ``/``."""

    target_ca: str = ""
    """PEM file of the authorities of the targets' certificates; empty: plain text."""
    target_certificate: str = ""
    """PEM file of this gateway's certificate, for targets that need one (mutual TLS)."""
    target_key: str = ""
    """PEM file of the private key of ``target_certificate``."""
    target_server_name: str = ""
    """Name in the certificates of the targets. Needed with ``target_ca`` if ``targets`` has DNS
    names, because connections use their addresses. Empty: the host of the address."""
    target_token_file: str = ""
    """File whose first line is the token that targets accept from clients; empty for none."""

    max_requests: int = field(default=512, metadata={"min": 1, "max": 65_536})
    """Maximum number of concurrent requests of the API; further ones are answered 429. One client,
    an API key or else an address, has at most seven eighths of them."""
    max_connections: int = field(default=2048, metadata={"min": 1, "max": 65_536})
    """Maximum number of connections. A further one replaces the one that has waited longest for a
    request; it is closed if all have a request."""
    max_body_bytes: int = field(default=8 << 20, metadata={"min": 1024, "max": 64 << 20})
    """Maximum size of the body of a request; a larger one is answered 413. The limit is lower where
    the longest prompt of the models is shorter."""
    max_total_body_bytes: int = field(default=64 << 20, metadata={"min": 2048, "max": 16 << 30})
    """Maximum size of the bodies that are received, and of the prompts and the whole responses of
    all requests in progress; a stream holds no response. A client (an API key, or an address
    without keys) has at most half of what the others leave; above it, its requests are answered
    429. A request that alone needs over half of all is answered 413. A body needs up to 10 times
    its size in memory while it is parsed, one after the other, and a prompt of token ids up to 5
    times its size."""
    request_timeout_seconds: float = field(default=660.0, metadata={"min": 0.001, "max": 86_400.0})
    """Maximum duration of a request, in seconds. It is then answered 408. It is longer by default
    than in a target, which answers requests that only waited with 429."""
    stream_stall_seconds: float = field(default=60.0, metadata={"min": 0.001, "max": 86_400.0})
    """A request whose client reads nothing for this many seconds is cancelled."""
    drain_seconds: float = field(default=30.0, metadata={"min": 0.0, "max": 3600.0})
    """Maximum time that requests continue after SIGTERM, in seconds."""

    termination_log: str = TERMINATION_LOG
    """File for one line with the cause of the end: ``Type: message (file:line)``, at most 1 KiB.
    The default file is skipped if it is missing or not writable; empty for none."""
    log_format: Literal["json", "text"] = "json"
    """Format of log lines on standard error."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise SettingsError("targets: is empty; name at least one host:port")
        for address in self.targets:
            check_address("targets", address)
        if self.max_total_body_bytes < 2 * self.max_body_bytes:
            raise SettingsError(
                f"max_total_body_bytes: is {self.max_total_body_bytes}, must be at least "
                f"{2 * self.max_body_bytes}, twice max_body_bytes: a client has at most half of it"
            )
        if (
            self.target_ca
            and not self.target_server_name
            and not all(map(is_literal, self.targets))
        ):
            raise SettingsError(
                "target_server_name: connections use the addresses behind the DNS names of "
                "targets; give the name that is in the certificates of the targets"
            )
        if not self.api_keys_file and not self.allow_insecure and not is_loopback(self.host):
            raise SettingsError(
                f"every machine that reaches {self.host} could use the API: set api_keys_file, or "
                "allow_insecure if the network protects the port"
            )
