"""Llama 3. Qwen3 uses the same decoder with norms on queries and keys."""

from ssd.engine.config import ModelConfig
from ssd.engine.layers.linear import Linear
from ssd.engine.layers.norm import RMSNorm
from ssd.engine.models.decoder import Decoder, DecoderLayer
from ssd.engine.models.weights import TensorReader

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"


def shapes(config: ModelConfig, *, with_head_norms: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each tensor that the checkpoint must contain."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_size
    needed: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        needed[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        needed |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (config.num_heads * head, hidden),
            prefix + "self_attn.k_proj.weight": (config.num_kv_heads * head, hidden),
            prefix + "self_attn.v_proj.weight": (config.num_kv_heads * head, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, config.num_heads * head),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
        if with_head_norms:
            needed[prefix + "self_attn.q_norm.weight"] = (head,)
            needed[prefix + "self_attn.k_norm.weight"] = (head,)
    return needed


def ignored(config: ModelConfig) -> frozenset[str]:
    """Return the names of derived tensors that a checkpoint can contain, and that are not read."""
    rotary = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return frozenset(rotary | ({HEAD} if config.tie_word_embeddings else set()))


def build(config: ModelConfig, read: TensorReader, *, with_head_norms: bool = False) -> Decoder:
    """Read a checkpoint's tensors into a decoder."""

    def norm(name: str) -> RMSNorm:
        return RMSNorm(read(name), config.rms_norm_eps)

    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        layers.append(
            DecoderLayer(
                input_norm=norm(prefix + "input_layernorm.weight"),
                qkv=Linear(read(*(f"{attention}{name}_proj.weight" for name in "qkv"))),
                query_norm=norm(attention + "q_norm.weight") if with_head_norms else None,
                key_norm=norm(attention + "k_norm.weight") if with_head_norms else None,
                output=Linear(read(attention + "o_proj.weight")),
                mlp_norm=norm(prefix + "post_attention_layernorm.weight"),
                gate_up=Linear(
                    read(prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight")
                ),
                down=Linear(read(prefix + "mlp.down_proj.weight")),
            )
        )
    embedding_VD = read(EMBEDDING, may_contain_nan=not config.tie_word_embeddings)
    head = Linear(embedding_VD if config.tie_word_embeddings else read(HEAD))
    return Decoder(config, embedding_VD, layers, norm(NORM), head)
