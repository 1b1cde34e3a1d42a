"""Numbers of weights and bytes of a model and its caches; imported without torch."""

from ssd.engine.config import (
    DTYPE_BYTES,
    STATIC,
    EngineConfig,
    ModelConfig,
    sequence_buckets,
)

_NOISE_ROWS_AHEAD = 15
"""Rows of noise of a sequence that are computed before they are needed."""
_LOGIT_BYTES = 4


def has_head_norms(model: ModelConfig) -> bool:
    """Return whether queries and keys have a norm."""
    return model.family == "qwen3"


def layer_weights(model: ModelConfig) -> int:
    """Return the number of weights of one layer."""
    width, head_size = model.hidden_size, model.head_size
    query, key = model.num_heads * head_size, model.num_kv_heads * head_size
    attention = 2 * width * query + 2 * width * key
    norms = 2 * width + (2 * head_size if has_head_norms(model) else 0)
    return attention + 3 * width * model.intermediate_size + norms


def pass_weights(model: ModelConfig) -> int:
    """Return the number of weights that a pass reads: all but the rows of the embedding."""
    head = model.vocab_size * model.hidden_size
    return model.num_layers * layer_weights(model) + model.hidden_size + head


def num_weights(model: ModelConfig) -> int:
    """Return the number of weights of a checkpoint; a tied head counts once."""
    embedding = model.vocab_size * model.hidden_size
    return pass_weights(model) + (0 if model.tie_word_embeddings else embedding)


def bytes_per_entry(model: ModelConfig, dtype: str) -> int:
    """Return the bytes of one entry of the KV cache over all layers."""
    width = model.num_kv_heads * model.head_size
    return 2 * model.num_layers * width * DTYPE_BYTES[dtype]


def segment_sessions(engine: EngineConfig) -> int:
    """Return the number of sessions of a draft that have segments; 0 for a target.

    In the static engine, one more than ``max_num_seqs``, for the rows of padding.
    """
    if engine.branches == 0:
        return 0
    return engine.max_num_seqs + (1 if engine.engine == STATIC else 0)


def segment_entries(engine: EngineConfig) -> int:
    """Return the number of entries of all segments of a draft; 0 for a target."""
    return segment_sessions(engine) * engine.num_columns * (1 + engine.branches)


def branch_logits_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    """Return the size of the logits that a draft keeps: every step of every branch."""
    rows = engine.max_num_seqs * engine.branches * engine.num_columns
    return rows * model.vocab_size * DTYPE_BYTES[engine.dtype]


def sampling_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    """Return the size of what a target on a CPU samples with: noise, and logits and their copy.

    The noise of a row is allocated when a request needs it (``RingSampler``).
    """
    rows = 4 * engine.num_columns + _NOISE_ROWS_AHEAD
    return engine.max_num_seqs * rows * model.vocab_size * _LOGIT_BYTES


def graph_output_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    """Return the size of the logits that the captured passes of the static engine return.

    Each shape keeps its own, in float32. All shapes share the product of the head, in the dtype.
    """
    rows = (engine.num_columns, *(engine.branch_counts if engine.branches else ()))
    own_rows = sum(sequence_buckets(engine)) * sum(rows)
    shared_rows = engine.max_num_seqs * max(rows)
    return (own_rows * _LOGIT_BYTES + shared_rows * DTYPE_BYTES[engine.dtype]) * model.vocab_size
