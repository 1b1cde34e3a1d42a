"""Runners of a Llama-3.1-8B shape on a device without hardware, see ``ssd.testing.fake_device``."""

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssd.engine.attention.dense import PagedReference
from ssd.engine.attention.paged import PagedAttention
from ssd.engine.capture import Capture
from ssd.engine.config import STATIC, EngineConfig, ModelConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.models.decoder import Decoder
from ssd.engine.models.weights import DecoderWeights, LayerWeights
from ssd.engine.parallel.group import ALONE, Group, RankGroup
from ssd.engine.parallel.shard import ids_of_ranks, model_of
from ssd.engine.rank_loop import SplitTarget
from ssd.engine.runner import ModelRunner
from ssd.engine.sizes import has_head_norms
from ssd.engine.static_execution import make_execution
from ssd.testing.fake_device import FakeDevice

LAYERS = 2
MODEL = replace(
    KNOWN_SHAPES["llama-3.1-8b"],
    num_layers=LAYERS,
    rope_scaling=None,
    max_position_embeddings=8192,
)
AnyRunner = TypeVar("AnyRunner", bound=ModelRunner)


def on_fake_gpu(
    kind: type[AnyRunner],
    engine: EngineConfig,
    device: FakeDevice,
    group: Group = ALONE,
    *,
    model: ModelConfig = MODEL,
    attention: PagedAttention | None = None,
) -> AnyRunner:
    """Return a runner on the device; its weights and results have no values.

    Of several ranks, it is rank 0, with its part of the model.
    """
    engine = replace(
        engine, device=device.name, engine=STATIC, dtype="bfloat16", kv_cache_bytes=1 << 30
    )
    attention = attention or PagedReference()
    part = model_of(model, group.shard)
    decoder = Decoder(part, _weights(part, device.name), group)
    execution: Any = make_execution(decoder, engine, attention, Capture(), group)
    if isinstance(group, RankGroup):
        execution = SplitTarget(execution, group, engine, ids_of_ranks(MODEL, group.shard.size))
    return kind(execution, model, engine)


def _weights(model: ModelConfig, device: str) -> DecoderWeights:
    def of(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    size, heads = model.hidden_size, model.num_heads * model.head_size
    keys = model.num_kv_heads * model.head_size
    layer = LayerWeights(
        input_norm_D=of(size),
        qkv_OD=of(heads + 2 * keys, size),
        query_norm_E=of(model.head_size) if has_head_norms(model) else None,
        key_norm_E=of(model.head_size) if has_head_norms(model) else None,
        output_DO=of(size, heads),
        mlp_norm_D=of(size),
        gate_up_ID=of(2 * model.intermediate_size, size),
        down_DI=of(size, model.intermediate_size),
    )
    return DecoderWeights(
        embedding_VD=of(model.vocab_size, size),
        layers=iter([layer] * model.num_layers),
        norm_D=of(size),
        head_VD=of(model.vocab_size, size),
        free_pages=lambda: None,
    )
