"""Settings of the draft process. Sources and precedence: ``ssd.settings``."""

from dataclasses import dataclass, field
from typing import Literal

from ssd.engine_settings import EngineSettings
from ssd.errors import SettingsError
from ssd.types import FanOutName


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings(EngineSettings):
    """Settings of ``python -m ssd_draft``."""

    model: str = "demo://draft"
    port: int = field(default=50052, metadata={"min": 0, "max": 65535})
    http_port: int = field(default=9091, metadata={"min": 0, "max": 65535})
    max_sessions: int = field(default=16, metadata={"min": 1, "max": 256})
    """Maximum number of sessions of all links together; further ones are refused."""
    fan_out: FanOutName = "adaptive"
    """Policy that selects the outcomes that get a branch, unless a target sends another one."""
    channel: Literal["grpc", "collective"] = "grpc"
    """How tables and commits may travel. With ``collective``, a target that has it too can use a
    connection beside the gRPC stream. That is not encrypted and needs targets of your own: a
    hostile one can end the draft. With ``grpc``, all links use gRPC."""
    state_folder: str = ""
    """Folder of this draft alone, made if missing, in which it keeps the values of the fan-out
    ``adaptive`` that it has fitted to outcomes. The step thread writes there, so it is on a local
    disk. Empty: they are fitted again after each start, in some hundred rounds."""
    adaptive_branches: bool = True
    """A table gets fewer branches (N/2 or N/4), or half the columns, if that yields more accepted
    tokens in time. Without it, each table has N, for measurements of hit rates."""
    inject_step_ms: float = field(default=0.0, metadata={"min": 0.0, "max": 60_000.0})
    """Fault injection: time that is added to each step of a tree, in milliseconds."""

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if self.tls_client_ca and not (self.caller_names or self.token_file):
            raise SettingsError(
                "caller_names: every certificate that tls_client_ca signed could open a link; give "
                "the names in the certificates of targets, or token_file"
            )
        if self.tls_certificate and self.channel != "grpc":
            raise SettingsError(
                f"channel {self.channel} is not encrypted, and tls_certificate requests TLS: set "
                "channel to grpc"
            )

    @property
    def num_reserved_positions(self) -> int:
        """Positions that a tree can use beyond the committed tokens, 2K + 2."""
        return 2 * self.lookahead + 2
