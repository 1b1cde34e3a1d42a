"""Models of the Hugging Face hub: their names, and what its library says, in sentences of ours."""

import errno
import os
from dataclasses import dataclass
from http import HTTPStatus

from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of its client
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ssd.errors import CacheError, HubError, ModelNotFoundError, SettingsError, SetupError

WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
"""Files of a model that are fetched."""
HUB_ERRORS = (OSError, HTTPError)
"""What the hub's library raises of disks and networks; its newer versions' client has errors that
are no ``OSError``."""
_HUB = "hf://"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_RIGHT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_REFUSALS = {
    RevisionNotFoundError: "the hub has the model, but not this revision",
    GatedRepoError: "the hub gives it to accounts only that have accepted its terms; accept them, "
    "and give a token of that account",
    RepositoryNotFoundError: "the hub has no such model, or shows it to some accounts only; "
    "look at the name, or give a token",
}
"""What the hub means, the narrower errors first."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub."""

    name: str
    """``org/name``."""
    revision: str | None
    """A commit, branch or tag; None for the default branch."""

    @classmethod
    def parse(cls, uri: str) -> "HubModel | None":
        """What ``hf://org/name@revision`` names; None for what is not on the hub."""
        if not uri.startswith(_HUB):
            return None
        name, _, revision = uri.removeprefix(_HUB).partition("@")
        return cls(name, revision or None)


def as_setup_error(model: str, error: Exception) -> SetupError:
    """What the hub's library has to say of a model, as one sentence with the cure."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        # It says that the model is not here; why it could not be had is the news.
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return CacheError(f"{model}: no room is left in {HF_HUB_CACHE}; give it a larger volume")
    if isinstance(error, OSError) and error.errno in _NO_RIGHT:
        return SettingsError(
            f"{model}: user {os.getuid()} may not write to {HF_HUB_CACHE}; "
            f"give the folder to it, or name another cache: {error}"
        )
    for kind_of_refusal, sentence in _REFUSALS.items():
        if isinstance(error, kind_of_refusal):
            return ModelNotFoundError(f"{model}: {sentence}")
    kind = HubError if may_pass(error) else ModelNotFoundError
    return kind(f"{model}: not on the hub and not downloaded: {error}")


def may_pass(error: Exception) -> bool:
    """Whether asking the hub again later may help: it was not reached, or it was too busy."""
    if isinstance(error, HfHubHTTPError):
        code = error.response.status_code
        return code >= HTTPStatus.INTERNAL_SERVER_ERROR or code == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(error, HUB_ERRORS)
