"""Where a model comes from: a folder, the embedded pair, or the Hugging Face hub."""

import errno
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of its client
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ssd import demo
from ssd.demo.widen import widen
from ssd.errors import CacheError, HubError, ModelNotFoundError, SettingsError, SetupError

_WIDENED = Path.home() / ".cache" / "ssd" / "widened"
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


def resolve(model: str) -> Path:
    """The folder behind ``model``.

    Raises:
        ModelNotFoundError: there is no such folder, demo model or hub entry.
        HubError: the hub does not answer, and the model has not been fetched.
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


def _fetched(model: HubModel, uri: str) -> Path:
    """The hub's files, from its cache on this machine or downloaded."""
    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=WANTED))
    except (*HUB_ERRORS, ValueError) as error:
        raise as_setup_error(uri, error) from error


def as_setup_error(model: str, error: Exception) -> SetupError:
    """What the hub's library has to say of a model, as one sentence with the cure."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        # It says that the model is not here; why it could not be had is the news.
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return CacheError(f"{model}: no room is left in {HF_HUB_CACHE}; give it a larger volume")
    if isinstance(error, OSError) and error.errno in _NO_RIGHT:
        return SettingsError(f"{model}: this user may not write to {HF_HUB_CACHE}: {error}")
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


def _widened(model: str, folder: Path) -> Path:
    """The packaged folder, or a wider model of the same function, made once and kept."""
    factor = demo.widening(model)
    if factor == 1:
        return folder
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    return widen(folder, factor, _WIDENED / f"{folder.name}-x{factor}-{made_at}")
