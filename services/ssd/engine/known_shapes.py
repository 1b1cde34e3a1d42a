"""Shapes of public checkpoints by name, from their ``config.json``; no file is read."""

from collections.abc import Mapping
from types import MappingProxyType

from ssd.engine.config import ModelConfig, RopeScaling


def _llama(
    hidden: int, layers: int, heads: int, intermediate: int, *, rope_factor: float, is_tied: bool
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_size=hidden // heads,
        intermediate_size=intermediate,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            factor=rope_factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        max_position_embeddings=131_072,
        tie_word_embeddings=is_tied,
    )


def _qwen3(
    hidden: int, layers: int, heads: int, intermediate: int, *, is_tied: bool
) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_size=128,
        intermediate_size=intermediate,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        rope_scaling=None,
        max_position_embeddings=40_960,
        tie_word_embeddings=is_tied,
    )


KNOWN_SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-3.1-70b": _llama(8192, 80, 64, 28_672, rope_factor=8.0, is_tied=False),
        "llama-3.1-8b": _llama(4096, 32, 32, 14_336, rope_factor=8.0, is_tied=False),
        "llama-3.2-1b": _llama(2048, 16, 32, 8192, rope_factor=32.0, is_tied=True),
        "qwen3-32b": _qwen3(5120, 64, 64, 25_600, is_tied=False),
        "qwen3-8b": _qwen3(4096, 36, 32, 12_288, is_tied=False),
        "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, is_tied=True),
    }
)
