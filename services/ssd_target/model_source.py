"""Where a model comes from: a folder, the embedded pair, or the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from ssd import demo
from ssd.errors import ModelNotFoundError

_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]


def resolve(model: str) -> Path:
    """The folder behind ``model``.

    Raises:
        ModelNotFoundError: there is no such folder, demo model or hub entry.
    """
    if model.startswith("demo://"):
        return demo.folder(model.removeprefix("demo://"))
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
            f"{model}: no config.json there; give a model folder, demo://target or hf://org/name"
        )
    return folder
