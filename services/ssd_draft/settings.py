"""The knobs of the draft process. Sources and precedence: ``ssd.settings``."""

from dataclasses import dataclass, field
from typing import Literal

from ssd.settings import TERMINATION_LOG, parse_cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """What ``python -m ssd_draft`` can be told."""

    model: str = "demo://draft"
    """Model folder, ``demo://draft``, or ``hf://org/name@revision``."""
    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` or ``::`` for all, IPv6 among them where there is IPv6."""
    port: int = field(default=50052, metadata={"min": 0, "max": 65535})
    """gRPC port; 0 lets the system choose, the choice is logged."""
    http_port: int = field(default=9091, metadata={"min": 0, "max": 65535})
    """Port of /livez, /readyz and /metrics; 0 lets the system choose."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of weights and KV. ``auto`` is bfloat16 on CUDA and on CPUs with bfloat16 arithmetic
    (AVX512-BF16, AMX, AVX-NE-CONVERT), else float32. Target and drafts may differ."""
    device: str = "cpu"
    """Where the model runs: ``cpu``, ``cuda:0``."""
    attention: str = "cpu"
    """Attention backend; see ``ssd.engine.attention.backend``."""
    deterministic: bool = False
    """Every forward pass at one shape; costs speed and gains a draft nothing but repeatability."""
    max_model_len: int = field(default=0, metadata={"min": 0, "max": 1 << 20})
    """Tokens of one session at most; 0 takes the model's own, at most 4096."""
    prefill_chunk: int = field(default=128, metadata={"min": 16, "max": 8192})
    """Prompt tokens stored between two tree batches; larger delays running sessions more."""
    kv_cache_bytes: int = field(default=0, metadata={"min": 0})
    """Memory of the KV cache; 0 takes a share of what is free."""

    lookahead: int = field(default=6, metadata={"min": 1, "max": 16})
    """Tokens in a full proposal (K); a target with another one is refused."""
    branches: int = field(default=24, metadata={"min": 1, "max": 128})
    """Branches of an outcome table (N); a target with another number is refused."""
    max_sessions: int = field(default=16, metadata={"min": 1, "max": 256})
    """Sessions of all links together; one more is refused with "max_sessions"."""
    fan_out: Literal["adaptive", "uniform", "geometric"] = "adaptive"
    """Which outcomes get a branch, until a link says otherwise."""

    drain_seconds: float = field(default=30.0, metadata={"min": 0.0, "max": 3600.0})
    """After SIGTERM sessions may go on for this long."""
    inject_delay_ms: float = field(default=0.0, metadata={"min": 0.0, "max": 60_000.0})
    """Fault injection: each table leaves that much later, milliseconds."""
    threads: int = field(default=1, metadata={"min": 1, "max": 256})
    """Threads of one forward pass on a CPU."""
    cpus: str = ""
    """CPUs of the step thread, as ``0`` or ``0,2-3``; empty for all."""
    io_cpus: str = ""
    """CPUs of all other threads; empty for all."""
    pod_name: str = ""
    """Pod of the process, told to its peers; empty gives host name and process id."""
    node_name: str = ""
    """Node of the process, told to its peers."""
    cell: str = ""
    """Cell of the process, told to its peers."""
    termination_log: str = TERMINATION_LOG
    """File for the one line on why the process ended: ``Type: message (file:line)``, 1 KiB at most.
    The default is left out where it is not there or not writable; empty for none."""
    log_format: Literal["json", "text"] = "json"
    """Form of log lines on standard error."""
    reflection: bool = False
    """Serve gRPC reflection."""

    def __post_init__(self) -> None:
        _ = self.step_cpus, self.other_cpus

    @property
    def step_cpus(self) -> frozenset[int]:
        """CPUs of the step thread; empty for all."""
        return parse_cpus("cpus", self.cpus)

    @property
    def other_cpus(self) -> frozenset[int]:
        """CPUs of all other threads; empty for all."""
        return parse_cpus("io_cpus", self.io_cpus)

    @property
    def num_columns(self) -> int:
        """Columns of a proposal with the token before it, and steps of a tree (P)."""
        return self.lookahead + 1

    @property
    def num_reserved_positions(self) -> int:
        """Positions that a tree may reach beyond the committed tokens, 2K + 2."""
        return 2 * self.lookahead + 2
