"""The two models: those of transformers in training, and the folder that the product serves."""

import json
import math
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ssd.demo.widen import save_tensors
from ssd.engine.config import ModelConfig, read_config
from ssd.engine.models.headers import dtypes_of
from ssd.engine.models.llama import ignored
from ssd.engine.models.weights import STORED_DTYPES
from ssd.errors import SettingsError
from ssd_distill.run_folder import replace_file

Logits = Callable[[Tensor], Tensor]
"""From token ids [B, S] on any device to logits [B, S, V] on the device of the model."""
INNER_MULTIPLE = 32
"""The width of the MLP of a new draft is a multiple of it, which kernels are fast with."""


def logits_of(
    model: Any, num_token_ids: int | None = None, dtype: torch.dtype = torch.float32
) -> Logits:
    """Return the logits of a model as a function.

    Args:
        model: of transformers.
        num_token_ids: ids from this one on are padding, which has no logits; None: no padding.
        dtype: of the arithmetic; the weights keep their own.
    """

    def logits(ids_BS: Tensor) -> Tensor:
        device = model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            found_BSV: Tensor = model(ids_BS.to(device), use_cache=False).logits
        return found_BSV[..., :num_token_ids]

    return logits


def new_config(target: Path, num_layers: int, width: int) -> dict[str, Any]:
    """Return the ``config.json`` of a draft of the target's family, with tied embeddings.

    The head size and the ratio of the MLP's width to the model's are those of the target.

    Raises:
        SettingsError: the width is not a multiple of the head size.
    """
    shape = ModelConfig.from_folder(target)
    if width % shape.head_size:
        raise SettingsError(
            f"--hidden {width}: must be a multiple of the target's head size {shape.head_size}"
        )
    heads = width // shape.head_size
    inner = width * shape.intermediate_size / shape.hidden_size / INNER_MULTIPLE
    config = read_config(target)
    # Without types, all layers have full attention, which is all that is supported.
    for key in ("dtype", "torch_dtype", "layer_types"):
        config.pop(key, None)
    return config | {
        "num_hidden_layers": num_layers,
        "hidden_size": width,
        "intermediate_size": INNER_MULTIPLE * math.ceil(inner),
        "num_attention_heads": heads,
        "num_key_value_heads": math.gcd(heads, shape.num_kv_heads),
        "head_dim": shape.head_size,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def new_model(config: Mapping[str, Any], generator: torch.Generator) -> Any:
    """Return a float32 model of a ``config.json``, with random weights of the generator.

    Matrices are normal with a deviation of .02, and of less where they add to the residual stream.
    """
    shape = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    scale = (2 * shape.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02 * (scale if is_output else 1), generator)
    return model


def stored_dtype(folder: Path) -> str:
    """Return the name of the data type of a folder's weights, of the larger one if there are two.

    Raises:
        WeightsError: as ``read_headers``.
    """
    kinds = dtypes_of(folder, ignored(ModelConfig.from_folder(folder)))
    dtype = reduce(torch.promote_types, (STORED_DTYPES[kind] for kind in kinds))
    return str(dtype).removeprefix("torch.")


def write_weights(model: nn.Module, folder: Path) -> None:
    """Replace ``model.safetensors`` at once, in the data type that ``config.json`` names."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    # Tied embeddings are one parameter.
    tensors = {
        name: parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in model.named_parameters()
    }
    replace_tensors(tensors, folder / "model.safetensors")


def replace_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write tensors beside a file and rename them to it, so that no reader finds a part.

    Raises:
        OSError: the disk is full. Nothing is left of the new file.
    """
    new = file.with_suffix(".new")
    new.touch()
    mode = new.stat().st_mode
    try:
        save_tensors(tensors, new)
    except OSError:
        new.unlink()
        raise
    # Newer versions of the library let only the owner read the file.
    new.chmod(mode)
    replace_file(new, file)


def load_tensors(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read a file of ``replace_tensors``.

    Raises:
        SettingsError: it is damaged.
    """
    try:
        tensors: dict[str, Tensor] = load_file(file, device=device)
    except SafetensorError as error:
        raise SettingsError(f"{file} is damaged ({error}): remove it to begin again") from None
    return tensors
