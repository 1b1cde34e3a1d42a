"""Make a more expensive model of exactly the same function.

Every copy of the residual stream, of an attention head and of an MLP unit computes the same values
as the original. So acceptance is that of the trained pair, and a pass costs as much as with a
larger model. The number of weights of a layer grows with the square of the factor. With F copies:

- A matrix inside a layer is repeated F times in both directions and divided by F, because each
  output sums F equal inputs. F is a power of two, so the stored values are exact.
- The embedding is repeated along the width. The mean of squares in RMSNorm does not change.
- The weight of the last norm is divided by F, because the logits sum F equal copies. This is also
  correct for tied embeddings, where the output matrix cannot be scaled alone.
"""

import errno
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ssd.engine.config import FAMILIES, read_config
from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.engine.models.headers import weight_files
from ssd.errors import CacheError, SettingsError, SetupError, UnsupportedModelError, WeightsError

logger = logging.getLogger(__name__)

SCALED_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STREAM_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")
DIGEST_CHARS = 16
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_RIGHTS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
)


def widen(source: Path, factor: int, models: Path) -> Path:
    """Return a model of the same function whose width, heads and MLP are ``factor`` times larger.

    Head size, number of layers and vocabulary do not change. The folder is named by the factor and
    a fingerprint of the source. It is made once, in a temporary folder that is renamed at the end,
    so it is complete and two processes can make it.

    Args:
        source: Folder with ``config.json`` (llama or qwen3) and safetensors.
        factor: Of ``ssd.demo.FACTORS``.
        models: Folder in which the model is made.

    Raises:
        ModelNotFoundError: ``source`` has no readable ``config.json``.
        UnsupportedModelError: The family is not one of ``FAMILIES``, or a tensor is unknown.
        WeightsError: ``source`` has no safetensors, or damaged ones.
        SetupError: ``models`` cannot be written.
    """
    config = widened_config(read_config(source), factor)
    # Of the contents, so that all checkouts and environments share one copy of 400 MB.
    digest = weights_fingerprint(source).removeprefix("sha256:")[:DIGEST_CHARS]
    output = models / f"{source.name}-x{factor}-{digest}"
    try:
        if not output.is_dir():
            _make(source, factor, config, output)
    except OSError as error:
        is_of_source = Path(error.filename or "").is_relative_to(source)
        if error.errno in _NO_ROOM or (error.errno in _NO_RIGHTS and not is_of_source):
            raise _disk_error(models, error) from error
        raise
    return output


def _make(source: Path, factor: int, config: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as parent:
        unfinished = Path(parent) / "made"
        _write(source, factor, config, unfinished)
        try:
            unfinished.rename(output)
        except OSError:
            # Another process may have been faster.
            if not output.is_dir():
                raise
    logger.info("widened %s by %d into %s", source, factor, output)


def _disk_error(folder: Path, error: OSError) -> SetupError:
    """Return an error of the folder of widened models with the fix."""
    if error.errno in _NO_ROOM:
        return CacheError(
            f"{folder}: no space is left for a wider model: {error}; use a larger volume"
        )
    return SettingsError(
        f"{folder}: user {os.getuid()} cannot write a wider model: {error}; change the owner of "
        "this folder, or set HOME to another one for demo:// models"
    )


def widened_config(config: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return the ``config.json`` of the widened model.

    Raises:
        UnsupportedModelError: The family is not one of ``FAMILIES``.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModelError(f"cannot widen a {family!r} model; only {FAMILIES}")
    heads = config["num_attention_heads"]
    explicit = {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }
    wider = config | explicit
    return wider | {size: wider[size] * factor for size in SCALED_SIZES}


def widened_tensor(name: str, tensor: Tensor, factor: int) -> Tensor:
    """Return the tensor of the widened model; same dtype, exact values.

    The factor is a power of two.

    Raises:
        UnsupportedModelError: The kind of the tensor is unknown.
    """
    owner, _, kind = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if kind == "weight":
        if module in PROJECTIONS:
            return (tensor / factor).repeat(factor, factor)
        if module in {"embed_tokens", "lm_head"}:
            return tensor.repeat(1, factor)
        if module in STREAM_NORMS:
            return tensor.repeat(factor)
        if module in HEAD_NORMS:
            return tensor.clone()
        if module == "norm":
            return (tensor / factor).repeat(factor)
    raise UnsupportedModelError(f"cannot widen the tensor {name!r} of shape {tuple(tensor.shape)}")


def _write(source: Path, factor: int, config: dict[str, Any], output: Path) -> None:
    """Write a folder with this config, the widened tensors, and the other files."""
    output.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(source):
        try:
            with safe_open(file, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - a handle, not a dictionary
                    tensors[key] = widened_tensor(key, weights.get_tensor(key), factor)
        except SafetensorError as error:
            raise WeightsError(f"{file}: truncated or not safetensors: {error}") from error
    save_tensors(tensors, output / "model.safetensors")
    text = json.dumps(config, indent=2) + "\n"
    (output / "config.json").write_text(text, encoding="utf-8")
    copy_companions(source, output)


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write tensors into a file of a folder that can be written.

    Raises:
        OSError: the disk is full.
    """
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        # Nothing else can be wrong; the library has the cause only as a text.
        raise OSError(errno.ENOSPC, str(error), str(file)) from error


def copy_companions(source: Path, output: Path) -> None:
    """Copy the files beside config and weights: tokenizer, chat template, generation settings."""
    for file in source.iterdir():
        is_other = file.name in {"config.json", "model.safetensors.index.json"}
        if file.is_file() and file.suffix in {".json", ".jinja", ".txt", ".model"} and not is_other:
            shutil.copyfile(file, output / file.name)
