"""The Hugging Face hub: the files of a model that are fetched, and errors of the hub's library."""

import errno
import os
from http import HTTPStatus

from huggingface_hub import constants
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

from ssd.errors import CacheError, HubError, ModelNotFoundError, SettingsError, SetupError

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
