"""The knobs of the target process. Sources and precedence: ``ssd.settings``."""

from dataclasses import dataclass, field
from typing import Literal

from ssd.errors import SettingsError
from ssd.settings import TERMINATION_LOG, parse_cpus

DNS_SCHEME = "dns:///"
"""Before an address: a name to resolve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """What ``python -m ssd_target`` can be told."""

    model: str = "demo://target"
    """Model folder, ``demo://target``, or ``hf://org/name@revision``."""
    model_name: str = ""
    """Id that clients use; empty takes the last part of ``model``."""
    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` or ``::`` for all, IPv6 among them where there is IPv6."""
    port: int = field(default=50051, metadata={"min": 0, "max": 65535})
    """gRPC port; 0 lets the system choose, the choice is logged."""
    http_port: int = field(default=9090, metadata={"min": 0, "max": 65535})
    """Port of /livez, /readyz and /metrics; 0 lets the system choose."""
    drafts: tuple[str, ...] = ()
    """Addresses ``host:port`` of drafts. A DNS name stands for all addresses behind it and is
    resolved every 2 s; numbers and ``localhost`` are taken as they are. ``dns:///host:port`` is a
    name whatever it looks like."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of weights and KV. ``auto`` is bfloat16 on CUDA and on CPUs with bfloat16 arithmetic
    (AVX512-BF16, AMX, AVX-NE-CONVERT), else float32. Target and drafts may differ."""
    device: str = "cpu"
    """Where the model runs: ``cpu``, ``cuda:0``."""
    attention: str = "cpu"
    """Attention backend; see ``ssd.engine.attention.backend``."""
    deterministic: bool = False
    """Every forward pass at one shape, so that tokens never depend on batch mates."""
    max_model_len: int = field(default=0, metadata={"min": 0, "max": 1 << 20})
    """Prompt and new tokens of one sequence at most; 0 takes the model's own, at most 4096."""
    max_num_seqs: int = field(default=16, metadata={"min": 1, "max": 256})
    """Sequences that run together."""
    max_queue: int = field(default=256, metadata={"min": 0, "max": 100_000})
    """Requests that may wait; one more is refused with RESOURCE_EXHAUSTED."""
    prefill_chunk: int = field(default=128, metadata={"min": 16, "max": 8192})
    """Prompt tokens stored with one round; larger delays running streams more."""
    kv_cache_bytes: int = field(default=0, metadata={"min": 0})
    """Memory of the KV cache; 0 takes a share of what is free."""

    lookahead: int = field(default=6, metadata={"min": 1, "max": 16})
    """Tokens in a full proposal (K); more pays only while acceptance is high."""
    branches: int = field(default=24, metadata={"min": 1, "max": 128})
    """Branches of an outcome table (N)."""
    draft_deadline_ms: float = field(default=20.0, metadata={"min": 0.0, "max": 60_000.0})
    """Longest wait of a round for its tables, milliseconds; past it rows use their backup."""
    adaptive_deadline: bool = True
    """Wait less than that when tables are known to come sooner."""
    quarantine: bool = True
    """Leave a link alone for a while after three rounds in a row without any table in time."""
    require_transport: Literal["any", "rdma", "nvlink"] = "any"
    """A link over a slower transport is refused and the target serves on without it. Links run over
    TCP today, so all but ``any`` refuse every link."""
    max_round_trip_us: int = field(default=0, metadata={"min": 0, "max": 1_000_000})
    """A link whose round trip is measured longer is refused, microseconds; 0 sets no limit."""
    backup: Literal["none", "ngram"] = "ngram"
    """What a row proposes after a miss."""
    fan_out: Literal["adaptive", "uniform", "geometric", "explicit"] = "adaptive"
    """Which outcomes get a branch; the draft chooses them, the target says how."""
    fan_out_split: tuple[int, ...] = ()
    """Branches by accepted length, K+1 numbers, for ``explicit``."""

    request_timeout_seconds: float = field(default=600.0, metadata={"min": 0.001, "max": 86_400.0})
    """A request ends with DEADLINE_EXCEEDED after this long."""
    stream_stall_seconds: float = field(default=60.0, metadata={"min": 0.001, "max": 86_400.0})
    """A reader that takes nothing for this long while tokens wait is cancelled."""
    stream_buffer_tokens: int = field(default=65_536, metadata={"min": 1, "max": 1 << 24})
    """Tokens that wait for one reader at most; past it the request is cancelled."""
    drain_seconds: float = field(default=30.0, metadata={"min": 0.0, "max": 3600.0})
    """After SIGTERM running requests may go on for this long."""

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
        for address in self.drafts:
            check_address(address)
        if self.fan_out == "explicit" and len(self.fan_out_split) != self.lookahead + 1:
            raise SettingsError(
                f"fan_out explicit needs fan_out_split of {self.lookahead + 1} numbers "
                f"(lookahead + 1), found {len(self.fan_out_split)}"
            )
        if self.fan_out_split and sum(self.fan_out_split) != self.branches:
            raise SettingsError(
                f"fan_out_split adds up to {sum(self.fan_out_split)}, branches is {self.branches}"
            )

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
        """Columns of a verification (P)."""
        return self.lookahead + 1

    @property
    def served_name(self) -> str:
        """Id that clients use."""
        return self.model_name or self.model.rstrip("/").rpartition("/")[2]


def check_address(address: str) -> None:
    """Refuse what cannot be dialled.

    Raises:
        SettingsError: no host, or no port of 1..65535.
    """
    host, _, port = address.removeprefix(DNS_SCHEME).rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise SettingsError(f"drafts holds {address!r}, which is not host:port with port 1..65535")
