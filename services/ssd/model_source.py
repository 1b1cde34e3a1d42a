"""Where a model comes from: a folder, the embedded pair, or the Hugging Face hub."""

from http import HTTPStatus
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from ssd import demo
from ssd.demo.widen import widen
from ssd.errors import HubError, ModelNotFoundError

_WIDENED = Path.home() / ".cache" / "ssd" / "widened"
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_HUB = "hf://"


def resolve(model: str) -> Path:
    """The folder behind ``model``.

    Raises:
        ModelNotFoundError: there is no such folder, demo model or hub entry.
        HubError: the hub does not answer, and the model has not been fetched.
    """
    if model.startswith(_HUB):
        return _fetched(model)
    folder = local_folder(model)
    assert folder is not None
    return _widened(model, folder) if demo.is_demo(model) else folder


def local_folder(model: str) -> Path | None:
    """The folder behind ``model`` if it needs no hub, looked at and not made; else None.

    Raises:
        ModelNotFoundError: there is no such folder or demo model.
    """
    if model.startswith(_HUB):
        return None
    if demo.is_demo(model):
        return demo.folder(model)
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{model}: no config.json there; give a model folder, demo://target, demo://draft or hf://org/name"
        )
    return folder


def _fetched(model: str) -> Path:
    """The hub's files, from its cache on this machine or downloaded."""
    name, _, revision = model.removeprefix(_HUB).partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_WANTED))
    except (OSError, ValueError) as error:
        kind = HubError if may_pass(error) else ModelNotFoundError
        raise kind(f"{model}: not on the hub and not downloaded: {error}") from error


def may_pass(error: Exception) -> bool:
    """Whether asking the hub again later may help: it was not reached, or it was too busy."""
    if isinstance(error, HfHubHTTPError):
        code = error.response.status_code
        return code >= HTTPStatus.INTERNAL_SERVER_ERROR or code == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(error, OSError)


def _widened(model: str, folder: Path) -> Path:
    """The packaged folder, or a wider model of the same function, made once and kept."""
    factor = demo.widening(model)
    if factor == 1:
        return folder
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    return widen(folder, factor, _WIDENED / f"{folder.name}-x{factor}-{made_at}")
