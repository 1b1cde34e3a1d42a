"""Qwen3 dense: the decoder of Llama with a norm on each query and key head."""

from ssd.engine.config import ModelConfig
from ssd.engine.models import llama
from ssd.engine.models.decoder_weights import DecoderWeights
from ssd.engine.models.weights import TensorReader


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """See ``llama.shapes``."""
    return llama.shapes(config, with_head_norms=True)


def weights(config: ModelConfig, read: TensorReader) -> DecoderWeights:
    """See ``llama.weights``."""
    return llama.weights(config, read, with_head_norms=True)
