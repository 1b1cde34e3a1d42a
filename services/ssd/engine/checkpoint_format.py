"""Formats of checkpoints: the engine reads safetensors only. Imported without torch."""

from pathlib import Path

_SAFETENSORS = ".safetensors"
_GGUF = (
    "GGUF is not supported; use the same model as safetensors: a folder with the layout of "
    "Hugging Face, or hf://org/name"
)
_PICKLE = (
    "pickled weights are not read, because they can run code; save the model as safetensors, for "
    "example with save_pretrained of transformers"
)
_ADVICE = {".gguf": _GGUF, ".bin": _PICKLE, ".pt": _PICKLE, ".pth": _PICKLE}


def refused_format(path: Path) -> str:
    """Return why a file, or the weights of a folder, cannot be read, and what to use instead.

    Empty if the format is safetensors or unknown.
    """
    files = [path] if path.is_file() else sorted(path.glob("*"))
    if any(file.suffix == _SAFETENSORS for file in files):
        return ""
    for file in files:
        if file.suffix in _ADVICE:
            place = "" if file == path else f"{file.name}: "
            return place + _ADVICE[file.suffix]
    return ""


def missing_weights(folder: Path) -> str:
    """Return why a folder has no weights; empty if it has a safetensors file."""
    if any(folder.glob(f"*{_SAFETENSORS}")):
        return ""
    return refused_format(folder) or f"no {_SAFETENSORS} file in this folder"
