"""Reads the tensors of Llama 3 and Qwen3 as the weights of a decoder."""

from ssd.engine.config import ModelConfig
from ssd.engine.models.decoder_weights import DecoderWeights, LayerWeights
from ssd.engine.models.llama import EMBEDDING, HEAD, NORM
from ssd.engine.models.weights import TensorReader
from ssd.engine.sizes import has_head_norms


def weights(config: ModelConfig, read: TensorReader) -> DecoderWeights:
    """Read a checkpoint's tensors; those of a layer are read when the layer is."""
    is_tied = config.tie_word_embeddings
    return DecoderWeights(
        # Each token reads a row of it.
        embedding_VD=read(EMBEDDING, may_contain_nan=not is_tied, is_copied=True),
        layers=(
            _layer(read, f"model.layers.{index}.", with_head_norms=has_head_norms(config))
            for index in range(config.num_layers)
        ),
        norm_D=read(NORM),
        head_VD=None if is_tied else read(HEAD),
        free_pages=read.free_pages,
    )


def _layer(read: TensorReader, prefix: str, *, with_head_norms: bool) -> LayerWeights:
    attention = prefix + "self_attn."
    return LayerWeights(
        input_norm_D=read(prefix + "input_layernorm.weight"),
        qkv_OD=read(*(f"{attention}{kind}_proj.weight" for kind in "qkv")),
        query_norm_E=read(attention + "q_norm.weight") if with_head_norms else None,
        key_norm_E=read(attention + "k_norm.weight") if with_head_norms else None,
        output_DO=read(attention + "o_proj.weight"),
        mlp_norm_D=read(prefix + "post_attention_layernorm.weight"),
        gate_up_ID=read(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"),
        down_DI=read(prefix + "mlp.down_proj.weight"),
    )
