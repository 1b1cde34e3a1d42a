"""Finds the folder of a model: a path, the embedded pair, or the Hugging Face hub."""

import os
from pathlib import Path

from huggingface_hub import snapshot_download

from ssd import demo
from ssd.errors import SettingsError
from ssd.model_files.hub import HUB_ERRORS, WANTED, as_setup_error
from ssd.model_files.model_name import HubModel, local_folder


def resolve(model: str) -> Path:
    """Return the folder of a model; download or widen it if necessary.

    Raises:
        ModelNotFoundError: there is no such folder, demo model or hub entry.
        SetupError: it cannot be downloaded.
    """
    if (on_hub := HubModel.parse(model)) is not None:
        return _fetched(on_hub, model)
    folder = local_folder(model)
    assert folder is not None
    return _widened(model, folder) if demo.is_demo(model) else folder


def _fetched(model: HubModel, uri: str) -> Path:
    """Return the folder of a hub model, from the cache of this machine or downloaded."""
    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=WANTED))
    except (*HUB_ERRORS, ValueError) as error:
        raise as_setup_error(uri, error) from error


def _widened(model: str, folder: Path) -> Path:
    """Return the packaged folder, or that of a wider model, which is made once and kept."""
    factor = demo.widening(model)
    if factor == 1:
        return folder
    # Imports torch, which only a wider model needs.
    from ssd.demo.widen import widen  # noqa: PLC0415

    return widen(folder, factor, _wider_models())


def _wider_models() -> Path:
    """Return the folder in which wider models are kept.

    Raises:
        SettingsError: the user of this process has no home folder.
    """
    try:
        return Path.home() / ".cache" / "ssd" / "widened"
    except RuntimeError as error:
        raise SettingsError(
            f"user {os.getuid()} has no home folder, in which wider models are kept; set HOME to "
            "a folder that this user can write to"
        ) from error
