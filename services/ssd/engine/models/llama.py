"""Names, shapes and parts of the tensors of Llama 3. Imported without torch.

Qwen3 has the same tensors, and norms on queries and keys.
"""

from ssd.engine.config import ModelConfig
from ssd.engine.parallel.shard import (
    Part,
    Shard,
    columns,
    heads_of,
    ids_of,
    kv_heads_of,
    rows,
    units_of,
)
from ssd.engine.sizes import has_head_norms

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
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
        if has_head_norms(config):
            needed[prefix + "self_attn.q_norm.weight"] = (head,)
            needed[prefix + "self_attn.k_norm.weight"] = (head,)
    return needed


def ignored(config: ModelConfig) -> frozenset[str]:
    """Return the names of derived tensors that a checkpoint can contain, and that are not read."""
    rotary = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return frozenset(rotary | ({HEAD} if config.tie_word_embeddings else set()))


def parts(config: ModelConfig, shard: Shard) -> dict[str, Part]:
    """Return the part of each split tensor that a rank reads; all ranks read the others whole."""
    if shard.is_whole:
        return {}
    head = config.head_size
    units, ids = rows(units_of(config, shard)), rows(ids_of(config, shard))
    kv_heads = rows(kv_heads_of(config, shard), head)
    part_of = {EMBEDDING: ids, HEAD: ids}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        part_of |= {
            prefix + "self_attn.q_proj.weight": rows(heads_of(config, shard), head),
            prefix + "self_attn.k_proj.weight": kv_heads,
            prefix + "self_attn.v_proj.weight": kv_heads,
            prefix + "self_attn.o_proj.weight": columns(heads_of(config, shard), head),
            prefix + "mlp.gate_proj.weight": units,
            prefix + "mlp.up_proj.weight": units,
            prefix + "mlp.down_proj.weight": columns(units_of(config, shard)),
        }
    return part_of
