"""Where a model comes from: a folder, the embedded pair, or the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download

from ssd import demo
from ssd.demo.widen import widen
from ssd.errors import ModelNotFoundError
from ssd.hub import HUB_ERRORS, WANTED, HubModel, as_setup_error

_WIDENED = Path.home() / ".cache" / "ssd" / "widened"


def resolve(model: str) -> Path:
    """The folder behind ``model``.

    Raises:
        ModelNotFoundError: there is no such folder, demo model or hub entry.
        SetupError: it could not be fetched.
    """
    if (on_hub := HubModel.parse(model)) is not None:
        return _fetched(on_hub, model)
    folder = local_folder(model)
    assert folder is not None
    return _widened(model, folder) if demo.is_demo(model) else folder


def local_folder(model: str) -> Path | None:
    """The folder behind ``model`` if it needs no hub, looked at and not made; else None.

    Raises:
        ModelNotFoundError: there is no such folder or demo model.
    """
    if HubModel.parse(model) is not None:
        return None
    if demo.is_demo(model):
        return demo.folder(model)
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{model}: no config.json there; give a model folder, demo://target, demo://draft or hf://org/name"
        )
    return folder


def _fetched(model: HubModel, uri: str) -> Path:
    """The hub's files, from its cache on this machine or downloaded."""
    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=WANTED))
    except (*HUB_ERRORS, ValueError) as error:
        raise as_setup_error(uri, error) from error


def _widened(model: str, folder: Path) -> Path:
    """The packaged folder, or a wider model of the same function, made once and kept."""
    factor = demo.widening(model)
    if factor == 1:
        return folder
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    return widen(folder, factor, _WIDENED / f"{folder.name}-x{factor}-{made_at}")
