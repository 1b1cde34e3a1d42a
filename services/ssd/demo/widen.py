"""Make a costlier model of exactly the same function: ``python -m ssd.demo.widen``.

Every copy of the residual stream, of an attention head and of an MLP unit computes what the
original does, so acceptance stays that of the trained pair while a pass costs what a real model's
does. The number of weights of a layer grows with the square of the factor. With F copies:

- a matrix inside a layer is repeated F times in both directions and divided by F, because each
  output now sums F equal inputs; F is a power of two, so the stored values stay exact;
- the embedding is repeated along the width, and the mean of squares that RMSNorm takes of a
  repeated stream is the old one;
- the logits would sum F equal copies, so the last norm's weight is divided by F. That holds with
  tied embeddings too, where the output matrix cannot be scaled alone.
"""

import argparse
import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ssd.demo import FACTORS
from ssd.errors import ModelNotFoundError, SetupError, UnsupportedModelError, WeightsError

logger = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "qwen3")
SCALED_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STREAM_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")
MARK = "widened.json"


def widen(source: Path, factor: int, output: Path) -> Path:
    """Write a model of the same function whose width, heads and MLP are ``factor`` times larger.

    The size of a head, the number of layers and the vocabulary stay. The work is done in a folder
    beside ``output`` that is renamed at the end, so two processes may ask for the same folder.

    Args:
        source: Folder with ``config.json`` (llama or qwen3) and safetensors.
        factor: 1, 2, 4 or 8.
        output: The folder to make. If it holds the same widening already, it is left as it is.

    Returns:
        ``output``.

    Raises:
        ModelNotFoundError: ``source`` holds no ``config.json``.
        UnsupportedModelError: The family is not one of ``MODEL_TYPES``, or a tensor is unknown.
        WeightsError: ``source`` holds no safetensors.
        SetupError: The factor is not allowed, or ``output`` holds something else.
    """
    if factor not in FACTORS:
        raise SetupError(f"cannot widen by {factor}; choose a factor of {FACTORS}")
    mark = {"factor": factor, "source_sha256": _fingerprint(source)}
    if output.exists():
        return _accept(output, mark)
    config = widened_config(_read_config(source), factor)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as name:
        made = Path(name) / "made"
        made.mkdir()
        tensors: dict[str, Tensor] = {}
        for file in _weight_files(source):
            with safe_open(file, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - a handle, not a dictionary
                    tensors[key] = widened_tensor(key, weights.get_tensor(key), factor)
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        _write_json(made / "config.json", config)
        _write_json(made / MARK, mark)
        for file in source.iterdir():
            if _is_companion(file):
                shutil.copyfile(file, made / file.name)
        try:
            made.rename(output)
        except OSError:
            # Another process was quicker; what it made is judged like any folder found here.
            return _accept(output, mark)
    logger.info("widened %s by %d into %s", source, factor, output)
    return output


def widened_config(config: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return the ``config.json`` of the widened model.

    Raises:
        UnsupportedModelError: The family is not one of ``MODEL_TYPES``.
    """
    family = config.get("model_type")
    if family not in MODEL_TYPES:
        raise UnsupportedModelError(f"cannot widen a {family!r} model; only {MODEL_TYPES}")
    heads = config["num_attention_heads"]
    explicit = {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }
    wider = config | explicit
    return wider | {name: wider[name] * factor for name in SCALED_SIZES}


def widened_tensor(name: str, tensor: Tensor, factor: int) -> Tensor:
    """Return what takes a tensor's place in the widened model; same dtype, values exact.

    Args:
        name: Its name in Hugging Face's checkpoint.
        tensor: Its values.
        factor: A power of two.

    Raises:
        UnsupportedModelError: The tensor is of no kind known here.
    """
    owner, _, kind = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if kind == "bias" and module in PROJECTIONS:
        return tensor.repeat(factor)
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


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` of a folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{folder} holds no config.json; name a folder that holds a model")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFoundError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFoundError(f"{file}: not a JSON object")
    return config


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors of a folder, sorted by name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no .safetensors file; other formats cannot be widened")
    return files


def _fingerprint(folder: Path) -> str:
    """Return a hash of what decides the widened model: configuration and weights."""
    _read_config(folder)
    digest = hashlib.sha256()
    for file in [folder / "config.json", *_weight_files(folder)]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _is_companion(file: Path) -> bool:
    """Say whether a file goes along unchanged: tokenizer and generation settings, no weights."""
    return (
        file.is_file()
        and file.suffix in {".json", ".jinja", ".txt", ".model"}
        and (file.name not in {"config.json", MARK, "model.safetensors.index.json"})
    )


def _accept(output: Path, mark: dict[str, Any]) -> Path:
    """Return ``output`` if it is the widening that ``mark`` describes."""
    file = output / MARK
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")) == mark:
        return output
    raise SetupError(
        f"{output} exists and is not this widening by {mark['factor']}; remove it or choose "
        "another folder"
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, indented, ending in a newline."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and widen."""
    parser = argparse.ArgumentParser(
        prog="python -m ssd.demo.widen", description="Make a costlier model of the same function."
    )
    parser.add_argument("source", type=Path, help="folder of the model")
    parser.add_argument("factor", type=int, choices=FACTORS)
    parser.add_argument("output", type=Path, help="folder to make")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    widen(options.source, options.factor, options.output)


if __name__ == "__main__":
    main()
