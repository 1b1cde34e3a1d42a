"""The settings that target and draft share."""

import re
from dataclasses import dataclass, field
from typing import Literal

from ssd.errors import SettingsError
from ssd.settings import TERMINATION_LOG, check_callers, parse_cpus

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


def check_device(name: str, device: str) -> None:
    """Refuse a word that is no device of any machine.

    Raises:
        SettingsError: names the setting or flag, which is ``name``.
    """
    if not _DEVICE.fullmatch(device):
        raise SettingsError(f"{name} is {device!r}, must be cpu, cuda or cuda:NUMBER")


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

    tls_certificate: str = ""
    """PEM file of the certificate chain of the gRPC port; empty for plain text. A target also
    presents it to its drafts. All files of certificates and tokens are read again when they
    change."""
    tls_key: str = ""
    """PEM file of the private key of ``tls_certificate``."""
    tls_client_ca: str = ""
    """PEM file of authorities. A caller then needs a certificate of one of them (mutual TLS)."""
    token_file: str = ""
    """File of bearer tokens, one a line. A caller needs one of them: a client of a target, a target
    that opens a link to a draft. Empty: callers need no token."""
    caller_names: tuple[str, ...] = ()
    """Names in certificates (subject alternative names), of which these callers need one."""
    admin_token_file: str = ""
    """As ``token_file``, for AdminService of a target, and Drain and GetStatus of a draft. If this
    and ``admin_names`` are empty, these calls need the same as all others."""
    admin_names: tuple[str, ...] = ()
    """As ``caller_names``, for the calls of ``admin_token_file``."""
    allow_insecure: bool = False
    """Listen on an address that other machines reach although callers need neither a token nor a
    certificate, and exchange tokens with other machines in plain text."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of arithmetic and KV cache. ``auto`` is bfloat16 on CUDA, on CPUs with AMX, and for
    models of at least 4M weights on CPUs with AVX512-BF16; else float32. Target and drafts may
    differ."""
    weights: Literal["auto", "same", "int8", "int4"] = "auto"
    """Format of the weights on a CPU, computed at load: ``same`` as the dtype, ``int8`` with one
    scale a row, or ``int4`` with one for 64 inputs. int8 and int4 change the model slightly. On
    CPUs with VNNI or AMX, passes of 1 to 56 rows are 1.6 to 4.4 times as fast as with float32
    (208M weights). ``auto`` is int8 for a draft of at least 4M weights on CPUs with instructions
    for it (VNNI, AMX). For a target it is ``same``, but 32M weights or more that a checkpoint has
    in bfloat16 stay so on CPUs with AVX2 and without AVX-512."""
    device: str = "cpu"
    """Device of the model: ``cpu``, ``cuda:0``."""
    engine: Literal["auto", "openvino", "static", "torch"] = "auto"
    """What executes the forward passes. ``auto`` is ``openvino`` on CPUs, ``torch`` for several
    ranks on CPUs, and ``static`` on GPUs. Target and drafts may differ."""
    attention: Literal["auto", "flash_attn", "flex", "reference"] = "auto"
    """Attention of the engine static. ``auto`` is ``flash_attn`` on GPUs if the package flash-attn
    is installed, the dtype is bfloat16 and the head size a multiple of 8, else ``flex``. On CPUs it
    is ``reference``, which is slow and runs everywhere."""
    compile_layers: bool = False
    """Compile the parts of each layer around its attention with torch.compile, which fuses small
    kernels and takes time at start-up. Only with the engine static. On GPUs it needs a C compiler;
    on a CPU no kernels are generated, so nothing is faster."""
    deterministic: bool = False
    """Run every forward pass at one shape. Tokens of a target then never depend on other requests;
    on a draft it has no use except repeatable tables."""
    max_model_len: int = field(default=0, metadata={"min": 0, "max": 1 << 20})
    """Maximum number of tokens of one sequence or session, prompt included; 0 takes the model's
    maximum, at most 4096."""
    prefill_chunk: int = field(default=128, metadata={"min": 16, "max": 8192})
    """Prompt tokens that a draft stores between two tree batches. Larger values delay running
    sessions more."""
    prefix_cache: bool = True
    """Store the common beginning of texts once: of prompts on a target, also of answers on a draft.
    Freed blocks keep it until their memory is needed. Off: the time to the first token, or to the
    first table, does not depend on the texts of other clients."""
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
        check_device("device", self.device)
        _ = self.step_cpus, self.other_cpus
        self._check_callers()

    def _check_callers(self) -> None:
        has_tls = bool(self.tls_certificate and self.tls_key)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise SettingsError("tls_certificate and tls_key: give both, or neither")
        if self.tls_client_ca and not has_tls:
            raise SettingsError("tls_client_ca needs tls_certificate and tls_key")
        for name in ("caller_names", "admin_names"):
            if getattr(self, name) and not self.tls_client_ca:
                raise SettingsError(
                    f"{name} are names in certificates of callers, which need tls_client_ca"
                )
        if not (self.tls_client_ca or self.allow_insecure):
            check_callers(
                self.host, "token_file", has_tokens=bool(self.token_file), has_tls=has_tls
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
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return 1

    @property
    def num_columns(self) -> int:
        """Columns of a verification and of a tree (P = K + 1)."""
        return self.lookahead + 1
