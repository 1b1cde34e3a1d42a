"""Finds the folder of a model: a path, the embedded pair, or the Hugging Face hub.

Also for ``ssd.fetch``: the files of a model that are downloaded, and errors of the hub's library.
"""

import errno
import os
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of its client
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ssd import demo
from ssd.errors import CacheError, HubError, ModelNotFoundError, SettingsError, SetupError
from ssd.model_files.model_name import HubModel, local_folder

# Otherwise each request names the version of torch and the program that runs the process.
constants.HF_HUB_DISABLE_TELEMETRY = True
WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
"""Files of a model that are downloaded."""
HUB_ERRORS = (OSError, HTTPError)
"""Errors of disks and networks that the hub's library raises. The HTTP client of newer versions has
errors that are no ``OSError``."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_RIGHT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_REFUSALS = {
    RevisionNotFoundError: "the hub has the model, but not this revision",
    GatedRepoError: "only accounts that have accepted its terms can download it; accept them, "
    "and use a token of that account",
    RepositoryNotFoundError: "the hub has no such model, or it is private; "
    "check the name, or use a token with access",
}
"""Messages for the refusals of the hub, subclasses first."""


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


def as_setup_error(model: str, error: Exception) -> SetupError:
    """Return an error of the hub's library as one sentence with the fix."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        # The error is that the cache lacks the model. Its cause is the error of the download.
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return CacheError(f"{model}: no space is left in {HF_HUB_CACHE}; use a larger volume")
    if isinstance(error, OSError) and error.errno in _NO_RIGHT:
        return SettingsError(
            f"{model}: user {os.getuid()} has no right to write to {HF_HUB_CACHE}; "
            f"change its owner, or use another cache folder: {error}"
        )
    for kind_of_refusal, sentence in _REFUSALS.items():
        if isinstance(error, kind_of_refusal):
            return ModelNotFoundError(f"{model}: {sentence}")
    if not is_transient(error):
        return ModelNotFoundError(f"{model}: not downloaded from the hub: {error}")
    return HubError(f"{model}: {_why_unreachable(error)}")


def _why_unreachable(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"the hub is overloaded; try again later: {error}"
    if not isinstance(error, (LocalEntryNotFoundError, ConnectionError, HTTPError)):
        return f"not downloaded from the hub: {error}"
    cause = error.__cause__ or error
    reason, fix = (
        ("HF_HUB_OFFLINE forbids a download", "unset it")
        if isinstance(cause, OfflineModeIsEnabled)
        else (f"the hub cannot be reached ({cause})", "check the network")
    )
    return (
        f"its files are not all in {HF_HUB_CACHE}, and {reason}; {fix}, or copy the model to this "
        "machine and use its folder"
    )


def is_transient(error: Exception) -> bool:
    """Return whether a later attempt may succeed: the hub was not reached, or was overloaded."""
    if isinstance(error, HfHubHTTPError):
        code = error.response.status_code
        return code >= HTTPStatus.INTERNAL_SERVER_ERROR or code == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(error, HUB_ERRORS)
