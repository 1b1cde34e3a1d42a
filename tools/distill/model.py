"""The shapes of the embedded pair, as ``config.json``, and the folders that stages write."""

import shutil
from pathlib import Path
from typing import Any

import torch
from tools.distill.vocabulary import END_OF_TEXT_ID, TOKENIZER_FILES

from ssd.engine.config import read_config
from ssd_distill.models import new_model
from ssd_distill.run_folder import write_json

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "torch_dtype": "bfloat16",
}
TARGET = BASE | {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DRAFT = BASE | {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def prepare_folder(folder: Path, config: dict[str, Any], tokenizer: Path) -> Path:
    """Write all of a model's folder but the weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    ends = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "do_sample": False}
    write_json(folder / "generation_config.json", ends)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def untrained(folder: Path, seed: int) -> Any:
    """Return a model of a prepared folder with random weights."""
    return new_model(read_config(folder), torch.Generator().manual_seed(seed))
