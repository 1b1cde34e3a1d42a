"""Checkpoints with random weights in the shapes of public models, and their small relatives.

The weights are random, but a target and its draft agree often. The row of the head for token t + 1
is the row of the embedding for token t, so both models continue t with t + 1. The layers, of random
weights, add a part that depends on the context. The last norm is scaled so that token t + 1 has a
logit of log(V) + ``MARGIN``: at temperature 1 it is likely, not certain.
"""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from tests.gpu.environment import Environment
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from ssd.engine.config import ModelConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.models.llama import EMBEDDING, HEAD, NORM, shapes
from ssd.engine.sizes import num_weights

MARGIN = 2.0
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
GPU_BYTES = 36e9
"""GPU memory that a pair of 8B and 1B needs with its cache, the draft loaded twice."""
DISK_SHARE = 0.9
SMALL_VOCABULARY = 512


class Pair(NamedTuple):
    """Folders of a target and its draft."""

    target: Path
    draft: Path


def llama_pair(environment: Environment) -> Pair:
    """Return Llama-3.1-8B with Llama-3.2-1B, written at the first call of a run."""
    return _pair(environment, "llama-3.1-8b", "llama-3.2-1b")


def qwen3_pair(environment: Environment) -> Pair:
    """Return Qwen3-8B with Qwen3-0.6B, written at the first call of a run."""
    return _pair(environment, "qwen3-8b", "qwen3-0.6b")


def small_pair(environment: Environment) -> tuple[str, str]:
    """Return a target and a draft that load fast: the embedded pair, on a CPU a smaller one."""
    if environment.is_cuda:
        return "demo://target?widen=4", "demo://draft?widen=4"
    pair = qwen3_pair(environment)
    return str(pair.target), str(pair.draft)


def _pair(environment: Environment, target: str, draft: str) -> Pair:
    shapes = {name: _shape(name, environment) for name in (target, draft)}
    if environment.is_cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
        if memory < GPU_BYTES:
            pytest.skip(
                f"the pair needs {GPU_BYTES / 1e9:.0f} GB of GPU memory, and the GPU has "
                f"{memory / 1e9:.0f}"
            )
    folders = {name: environment.scratch / name for name in shapes}
    missing = {name: shape for name, shape in shapes.items() if not folders[name].is_dir()}
    needed = 2 * sum(map(num_weights, missing.values()))
    free = shutil.disk_usage(environment.scratch).free * DISK_SHARE
    if needed > free:
        pytest.skip(
            f"the random weights need {needed / 1e9:.0f} GB in {environment.scratch}, which has "
            f"{free / 1e9:.0f}; name another folder with --scratch"
        )
    for seed, (name, shape) in enumerate(missing.items()):
        write_checkpoint(folders[name], shape, seed, environment.target_device)
    return Pair(folders[target], folders[draft])


def _shape(name: str, environment: Environment) -> ModelConfig:
    """Return a shape with a head of its own; for a CPU, a small one of the same family."""
    shape = replace(KNOWN_SHAPES[name], tie_word_embeddings=False)
    if environment.is_cuda:
        return shape
    is_target = name.endswith("8b")
    return replace(
        shape,
        vocab_size=SMALL_VOCABULARY,
        hidden_size=64 if is_target else 32,
        num_layers=2 if is_target else 1,
        num_heads=8 if is_target else 4,
        num_kv_heads=2,
        head_size=16,
        intermediate_size=128 if is_target else 64,
    )


def write_checkpoint(folder: Path, shape: ModelConfig, seed: int, device: str) -> None:
    """Write config, tokenizer and bfloat16 weights, one file for each layer.

    The folder is complete when it has its name.
    """
    made = folder.with_name(folder.name + ".part")
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(_config(shape)))
    _write_tokenizer(made, shape.vocab_size)
    generator = torch.Generator(device).manual_seed(seed)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in shapes(shape).items():
        part = name.split(".")[2] if ".layers." in name else "ends"
        files.setdefault(f"model-{part}.safetensors", {})[name] = size
    for file, sizes in files.items():
        tensors = {
            name: _tensor(name, size, shape, generator, device) for name, size in sizes.items()
        }
        if HEAD in tensors:
            tensors[HEAD] = tensors[EMBEDDING].roll(1, dims=0)
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        save_file(on_host, made / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": 2 * num_weights(shape)},
        "weight_map": {name: file for file, sizes in files.items() for name in sizes},
    }
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    made.rename(folder)


def _tensor(
    name: str, size: tuple[int, ...], shape: ModelConfig, generator: torch.Generator, device: str
) -> Tensor:
    if name == NORM:
        scale = (math.log(shape.vocab_size) + MARGIN) / shape.hidden_size
        return torch.full(size, scale, dtype=torch.bfloat16, device=device)
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16, device=device)
    drawn = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    if name == EMBEDDING:
        return drawn
    drawn *= size[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        drawn *= shape.num_layers**-0.5
    return drawn


def _config(shape: ModelConfig) -> dict[str, object]:
    rope = shape.rope_scaling
    scaling = None if rope is None else {"rope_type": "llama3", **asdict(rope)}
    return {
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer with one word for each id: ``w0 w1 w2``."""
    vocabulary = {f"w{index}": index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
