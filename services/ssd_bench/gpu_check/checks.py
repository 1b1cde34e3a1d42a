"""The list of checks, in the order in which they run: results before figures, then peers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its function and its part of the time."""

    function: str
    """``module:function`` below ``ssd_bench.gpu_check``, imported in the process of the check."""
    budget_seconds: float
    """Time that the checks before it leave to it. What they do not use is added."""
    is_peer: bool = False
    """It measures another product: its failure is reported as skipped."""


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "machine": Check("machine:check_machine", 45.0),
        "attention flex": Check("attention:check_flex", 150.0),
        "bits of flex": Check("attention:check_flex_bits", 45.0),
        "attention flash_attn": Check("attention:check_flash_attn", 45.0),
        "tokens of the embedded pair": Check("tokens:check_embedded_pair", 180.0),
        "graphs": Check("graphs:check_graphs", 105.0),
        "channel collective": Check("channel:check_collective", 90.0),
        "logits of llama": Check("models:check_llama_logits", 105.0),
        "tokens of llama": Check("tokens:check_llama", 120.0),
        "tokens of two ranks": Check("ranks:check_two_ranks", 75.0),
        "passes of llama": Check("passes:check_llama_passes", 120.0),
        "speed of llama": Check("speed:check_llama_speed", 90.0),
        "logits of qwen3": Check("models:check_qwen3_logits", 60.0),
        "tokens of qwen3": Check("tokens:check_qwen3", 75.0),
        "compiled layers of llama": Check("compiled:check_compiled_layers", 75.0),
        "peer transformers": Check("peers:measure_transformers", 45.0, is_peer=True),
        "peer vllm": Check("peers:measure_vllm", 45.0, is_peer=True),
        "attention flex, other shapes": Check("attention:check_flex_shapes", 30.0),
    }
)
