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
        "machine": Check("machine:check_machine", 10.0),
        "attention flex": Check("attention:check_flex", 50.0),
        "bits of flex": Check("attention:check_flex_bits", 15.0),
        "attention flash_attn": Check("attention:check_flash_attn", 15.0),
        "tokens of the embedded pair": Check("tokens:check_embedded_pair", 60.0),
        "graphs": Check("graphs:check_graphs", 35.0),
        "channel collective": Check("channel:check_collective", 30.0),
        "logits of llama": Check("models:check_llama_logits", 35.0),
        "tokens of llama": Check("tokens:check_llama", 40.0),
        "tokens of two ranks": Check("ranks:check_two_ranks", 25.0),
        "passes of llama": Check("passes:check_llama_passes", 40.0),
        "speed of llama": Check("speed:check_llama_speed", 30.0),
        "logits of qwen3": Check("models:check_qwen3_logits", 20.0),
        "tokens of qwen3": Check("tokens:check_qwen3", 25.0),
        "compiled layers of llama": Check("compiled:check_compiled_layers", 25.0),
        "peer transformers": Check("peers:measure_transformers", 15.0, is_peer=True),
        "peer vllm": Check("peers:measure_vllm", 15.0, is_peer=True),
        "attention flex, other shapes": Check("attention:check_flex_shapes", 10.0),
    }
)
