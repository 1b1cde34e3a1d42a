"""Settings of the target process. Sources and precedence: ``ssd.settings``."""

from dataclasses import dataclass, field
from typing import Literal

from ssd.addresses import is_literal
from ssd.engine_settings import EngineSettings
from ssd.errors import SettingsError
from ssd.pool.settings import DraftsSettings
from ssd.types import FanOutName


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings(DraftsSettings, EngineSettings):
    """Settings of ``python -m ssd_target``."""

    model: str = "demo://target"
    port: int = field(default=50051, metadata={"min": 0, "max": 65535})
    http_port: int = field(default=9090, metadata={"min": 0, "max": 65535})
    model_name: str = ""
    """Model id that clients use; empty takes the last part of ``model``."""
    tool_format: Literal["auto", "hermes", "llama3_json", "none"] = "auto"
    """Format in which the model writes calls of tools: ``hermes`` (Qwen3), ``llama3_json`` (Llama
    3), or none that a gateway reads. ``auto`` finds it in the chat template."""
    draft_model: str = ""
    """Model of a draft on the target's own device, for mode SYNCHRONOUS; empty for none. Requests
    of mode AUTO use it if ``drafts`` is empty."""
    draft_weights: Literal["auto", "same", "int8", "int4"] = "auto"
    """As ``weights``, for ``draft_model``."""

    tensor_parallel_size: Literal[1, 2, 4, 8] = 1
    """Number of ranks that share the target's model, each with its own process and device: GPUs
    from ``device`` on, or parts of ``cpus``. It must divide the model's attention heads. A draft
    model is not divided."""
    max_num_seqs: int = field(default=16, metadata={"min": 1, "max": 256})
    """Maximum number of sequences that run together."""
    max_queue: int = field(default=256, metadata={"min": 0, "max": 100_000})
    """Maximum number of requests that wait; further ones are refused with RESOURCE_EXHAUSTED."""
    max_queue_tokens: int = field(default=1 << 20, metadata={"min": 1, "max": 1 << 40})
    """Maximum number of prompt tokens that wait; further requests are refused with
    RESOURCE_EXHAUSTED. One request may wait whatever its length."""
    step_tokens: int = field(default=256, metadata={"min": 16, "max": 1 << 20})
    """Token budget of a step: the most prompt tokens that it stores. While sequences run, it stores
    as many as they have rows, so that it takes about twice as long, or ``prefill_chunk`` for each
    sequence whose prompt is not complete, if that is more. With the engine openvino, the verify of
    the step stores them too, up to 64 for each of these sequences."""
    prefill_chunk: int = field(default=0, metadata={"min": 0, "max": 8192})
    """Prompt tokens of a forward pass; prompts are stored, and shared, in multiples of it. 0 takes
    16 with the engine openvino, 32 with torch and 128 with static."""
    channel: Literal["grpc", "collective"] = "grpc"
    """How tables and commits travel. ``collective`` uses a connection beside the gRPC stream of
    each link: NCCL if both ends have it, else gloo. Drafts need the same setting. It needs TCP
    connections on any port between the pods, and drafts of your own: a hostile one can end the
    target. NCCL has not run on a GPU yet. If it does not connect, the link uses gRPC. The status
    has the reason."""
    max_round_trip_us: int = field(default=0, metadata={"min": 0, "max": 1_000_000})
    """Maximum measured round trip of a link, in microseconds; 0 sets no limit. A slower link is
    refused, and the target serves without it."""
    fan_out: FanOutName = "adaptive"
    """Policy by which drafts select the outcomes that get a branch."""

    request_timeout_seconds: float = field(default=600.0, metadata={"min": 0.001, "max": 86_400.0})
    """Maximum duration of a request, in seconds. It then ends with DEADLINE_EXCEEDED."""
    stream_stall_seconds: float = field(default=60.0, metadata={"min": 0.001, "max": 86_400.0})
    """A request whose client reads nothing for this many seconds while tokens wait is cancelled."""
    stream_buffer_tokens: int = field(default=65_536, metadata={"min": 1, "max": 1 << 24})
    """Maximum number of tokens, with the alternatives of ``logprobs``, that wait for one client.
    Beyond it the request is cancelled."""
    otlp_endpoint: str = ""
    """Collector of OpenTelemetry that receives the spans of requests over OTLP/gRPC, for example
    ``http://collector:4317``; empty for none. It needs the extra ``otel``."""

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        DraftsSettings.__post_init__(self)
        if self.link_ca and not self.link_server_name and not all(map(is_literal, self.drafts)):
            raise SettingsError(
                "link_server_name: links use the addresses behind the DNS names of drafts; give "
                "the name that is in the certificates of the drafts"
            )
        if self.link_ca and self.channel != "grpc":
            raise SettingsError(
                f"channel {self.channel} is not encrypted, and link_ca requests TLS: set channel "
                "to grpc"
            )

    @property
    def num_ranks(self) -> int:
        """See ``EngineSettings.num_ranks``."""
        return self.tensor_parallel_size

    @property
    def served_name(self) -> str:
        """Model id that clients use."""
        return self.model_name or self.model.rstrip("/").rpartition("/")[2]
