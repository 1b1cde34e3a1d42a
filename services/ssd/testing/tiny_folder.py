"""A random Llama of a few thousand weights with a byte tokenizer, as a folder on disk."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
VOCAB_SIZE = 257
"""256 bytes and the end of text, which is id 256."""


def write_tiny_folder(
    folder: Path,
    *,
    seed: int = 0,
    max_len: int = 256,
    attention_gain: float = 1.0,
    vocab_size: int = VOCAB_SIZE,
    nan_token: int | None = None,
) -> Path:
    """Write config, weights and tokenizer of a tiny model; returns the folder.

    Two folders of one seed have the same model. All folders have the same tokenizer.

    Args:
        folder: where to write.
        seed: of the weights.
        max_len: maximum length of a sequence in the config.
        attention_gain: factor of the output of attention. With 1, a choice depends almost only on
            the last token. With 8, a changed token of the context changes one choice in ten.
        vocab_size: rows of the embedding; can differ from the size of the tokenizer.
        nan_token: a token whose embedding is NaN. The head is then a separate tensor, else it is
            tied to the embedding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": nan_token is None,
        "eos_token_id": VOCAB_SIZE - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    weights = _weights(seed)
    for name in weights:
        if "o_proj" in name:
            weights[name] *= attention_gain
    embedding_VD = weights["model.embed_tokens.weight"]
    padding = max(0, vocab_size - VOCAB_SIZE)
    weights["model.embed_tokens.weight"] = torch.nn.functional.pad(
        embedding_VD[:vocab_size], (0, 0, 0, padding)
    )
    if nan_token is not None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.embed_tokens.weight"][nan_token] = torch.nan
    save_file(weights, folder / "model.safetensors")
    write_byte_tokenizer(folder)
    return folder


def write_tiny_qwen3(folder: Path, *, seed: int = 0, attention_gain: float = 1.0) -> Path:
    """Write a tiny model like ``write_tiny_folder``, with norms of query and key heads."""
    write_tiny_folder(folder, seed=seed, attention_gain=attention_gain)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    weights = {name: tensor.clone() for name, tensor in stored.items()}
    for layer in range(2):
        for name in ("q_norm", "k_norm"):
            weight_E = 1 + torch.linspace(-0.5, 0.5, 8) * (layer + 1)
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = weight_E
    save_file(weights, folder / "model.safetensors")
    return folder


def write_byte_tokenizer(folder: Path, end: str = END) -> None:
    """Write a tokenizer whose tokens are the 256 bytes, in a fixed order, and one end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(folder / "tokenizer.json"))


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        return torch.mul(drawn, shape[-1] ** -0.5)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, 32) * 4,
        "model.norm.weight": torch.ones(32),
    }
    shapes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (64, 32),
        "mlp.up_proj": (64, 32),
        "mlp.down_proj": (32, 64),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(32)
    return weights
