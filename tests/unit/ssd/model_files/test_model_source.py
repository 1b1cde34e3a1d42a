"""Folders of models, and errors of the hub."""

import errno
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ssd.errors import CacheError, HubError, ModelNotFoundError, SettingsError, SetupError
from ssd.model_files import model_source
from ssd.model_files.model_source import HUB_ERRORS, as_setup_error, resolve
from ssd.testing.tiny_folder import write_tiny_folder


def test_a_path_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve(str(write_tiny_folder(tmp_path / "model"))) == tmp_path / "model"


def test_the_embedded_pair_needs_no_download() -> None:
    assert (resolve("demo://target") / "config.json").is_file()


def test_a_request_to_the_hub_names_no_package_but_its_library() -> None:
    sent = HfApi()._build_hf_headers(token=False)["user-agent"].split("; ")
    assert {each.partition("/")[0] for each in sent} == {"unknown", "hf_hub", "python"}


def answer(code: int) -> Any:
    return SimpleNamespace(status_code=code, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LocalEntryNotFoundError("no answer"), HubError),
        (ConnectionError("reset"), HubError),
        (HfHubHTTPError("busy", response=answer(503)), HubError),
        (HfHubHTTPError("slower", response=answer(429)), HubError),
        (RepositoryNotFoundError("none", response=answer(404)), ModelNotFoundError),
        (HfHubHTTPError("not yours", response=answer(403)), ModelNotFoundError),
        (HFValidationError("no such name"), ModelNotFoundError),
    ],
)
def test_an_unreachable_hub_and_a_refusal_are_different_errors(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    def download(*_asked: object, **_how: object) -> str:
        raise error

    monkeypatch.setattr(model_source, "snapshot_download", download)
    with pytest.raises(kind, match="hf://org/name"):
        resolve("hf://org/name@0123")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENOSPC, "No space left"), CacheError, "larger volume"),
        (PermissionError(errno.EACCES, "denied", "/cache"), SettingsError, "no right to write"),
        (GatedRepoError("no", response=answer(403)), ModelNotFoundError, "accepted its terms"),
        (RevisionNotFoundError("no", response=answer(404)), ModelNotFoundError, "this revision"),
        (RepositoryNotFoundError("no", response=answer(401)), ModelNotFoundError, "use a token"),
        (HUB_ERRORS[1]("slow"), HubError, "slow"),
    ],
)
def test_errors_of_hub_and_disk_contain_a_fix(
    error: Exception, kind: type[SetupError], words: str
) -> None:
    found = as_setup_error("hf://org/name@0123", error)
    assert type(found) is kind
    assert words in str(found)
    assert "hf://org/name@0123" in str(found)


def test_the_error_states_the_refusal_and_not_the_empty_cache() -> None:
    refusal = HfHubHTTPError("bad token", response=answer(403))
    error = LocalEntryNotFoundError("not here")
    error.__cause__ = refusal
    assert isinstance(as_setup_error("hf://org/name", error), ModelNotFoundError)
    error.__cause__ = OSError("no route")
    assert isinstance(as_setup_error("hf://org/name", error), HubError)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (OfflineModeIsEnabled("set"), "HF_HUB_OFFLINE forbids a download; unset it, or copy"),
        (OSError("no route"), "the hub cannot be reached (no route); check the network, or copy"),
    ],
)
def test_without_a_hub_the_error_is_one_line_with_a_hint(cause: Exception, words: str) -> None:
    error = LocalEntryNotFoundError("Got: an error\nPlease check")
    error.__cause__ = cause
    found = str(as_setup_error("hf://org/name", error))
    assert found.startswith("hf://org/name: its files are not all in ")
    assert words in found
    assert "\n" not in found


def test_a_user_without_a_home_folder_needs_one_only_for_a_wider_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    # As at the import of a process.
    importlib.reload(model_source)
    assert resolve(str(write_tiny_folder(tmp_path / "model"))) == tmp_path / "model"
    with pytest.raises(SettingsError, match=r"user \d+ has no home folder.*; set HOME"):
        resolve("demo://target?widen=2")
