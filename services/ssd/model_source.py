"""Where a model comes from: a folder, the embedded pair, or the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from ssd import demo
from ssd.demo.widen import widen
from ssd.errors import ModelNotFoundError

_WIDENED = Path.home() / ".cache" / "ssd" / "widened"
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]


def resolve(model: str) -> Path:
    """The folder behind ``model``.

    Raises:
        ModelNotFoundError: there is no such folder, demo model or hub entry.
    """
    if demo.is_demo(model):
        return _demo_folder(model)
    if model.startswith("hf://"):
        name, _, revision = model.removeprefix("hf://").partition("@")
        try:
            return Path(snapshot_download(name, revision=revision or None, allow_patterns=_WANTED))
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
            raise ModelNotFoundError(
                f"{model}: not on the hub and not downloaded: {error}"
            ) from error
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{model}: no config.json there; give a model folder, demo://target, demo://draft or hf://org/name"
        )
    return folder


def _demo_folder(model: str) -> Path:
    """The packaged folder, or a wider model of the same function, made once and kept."""
    folder, factor = demo.folder(model), demo.widening(model)
    if factor == 1:
        return folder
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    return widen(folder, factor, _WIDENED / f"{folder.name}-x{factor}-{made_at}")
