"""The settings that target and draft share."""

from dataclasses import dataclass, field
from typing import Literal

from ssd.settings import TERMINATION_LOG, parse_cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Base of the settings of a process that runs a model."""

    model: str
    """Model folder, ``demo://target``, ``demo://draft``, or ``hf://org/name@revision``."""
    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` or ``::`` for all addresses, IPv4 and IPv6."""
    port: int = field(metadata={"min": 0, "max": 65535})
    """gRPC port; with 0 the system selects one, which is logged."""
    http_port: int = field(metadata={"min": 0, "max": 65535})
    """Port of /livez, /readyz and /metrics; with 0 the system selects one."""
    reflection: bool = False
    """Serve gRPC reflection."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights and KV cache. ``auto`` is bfloat16 on CUDA and on CPUs with bfloat16
    arithmetic (AVX512-BF16, AMX, AVX-NE-CONVERT), else float32. Target and drafts may differ."""
    device: str = "cpu"
    """Device of the model: ``cpu``, ``cuda:0``."""
    engine: Literal["auto", "openvino", "static", "torch"] = "auto"
    """What executes the forward passes. ``auto`` is ``openvino`` on CPUs in float32, ``torch`` on
    other CPUs, and ``static`` on GPUs. Target and drafts may differ."""
    attention: Literal["auto", "cpu", "flash_attn", "flex", "reference"] = "auto"
    """Attention of the engines torch and static. ``auto`` is ``flash_attn`` on GPUs if the package
    flash-attn is installed and the dtype is bfloat16, else ``flex``. On CPUs it is ``cpu``, with
    static ``reference``, which is slow and runs everywhere."""
    deterministic: bool = False
    """Run every forward pass at one shape. Tokens of a target then never depend on other requests;
    on a draft it has no use except repeatable tables."""
    max_model_len: int = field(default=0, metadata={"min": 0, "max": 1 << 20})
    """Maximum number of tokens of one sequence or session, prompt included; 0 takes the model's
    maximum, at most 4096."""
    prefill_chunk: int = field(default=128, metadata={"min": 16, "max": 8192})
    """Prompt tokens stored per round of a target, or between two tree batches of a draft. Larger
    values delay running sequences more."""
    kv_cache_bytes: int = field(default=0, metadata={"min": 0})
    """Memory of the KV cache in bytes, of each rank; 0 takes a share of the free memory."""
    lookahead: int = field(default=6, metadata={"min": 1, "max": 16})
    """Number of tokens in a full proposal (K). Target and drafts need the same value. Larger values
    need high acceptance."""
    branches: int = field(default=24, metadata={"min": 1, "max": 128})
    """Largest number of branches of an outcome table (N). Target and drafts need the same value."""
    threads: int = field(default=1, metadata={"min": 1, "max": 256})
    """Number of threads of one forward pass on a CPU, divided among the ranks of a target."""
    cpus: str = ""
    """CPUs of the step thread, as ``0`` or ``0,2-3``; empty for all. The ranks of a target divide
    them."""
    io_cpus: str = ""
    """CPUs of all other threads; empty for all."""

    drain_seconds: float = field(default=30.0, metadata={"min": 0.0, "max": 3600.0})
    """Maximum time that requests or sessions continue after SIGTERM, in seconds."""
    pod_name: str = ""
    """Pod of the process, reported to peers; empty takes host name and process id."""
    node_name: str = ""
    """Node of the process, reported to peers."""
    cell: str = ""
    """Cell of the process, reported to peers."""
    termination_log: str = TERMINATION_LOG
    """File for one line with the cause of the end: ``Type: message (file:line)``, at most 1 KiB.
    The default file is skipped if it is missing or not writable; empty for none."""
    log_format: Literal["json", "text"] = "json"
    """Format of log lines on standard error."""

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
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return 1

    @property
    def num_columns(self) -> int:
        """Columns of a verification and of a tree (P = K + 1)."""
        return self.lookahead + 1
