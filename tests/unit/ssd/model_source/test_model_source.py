"""Names of models and the folders behind them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from ssd import demo, model_source
from ssd.errors import HubError, ModelNotFoundError
from ssd.model_source import local_folder, resolve
from ssd.testing.tiny_folder import write_tiny_folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(write_tiny_folder(tmp_path / "model"))) == tmp_path / "model"


def test_the_embedded_pair_needs_no_download() -> None:
    assert (resolve("demo://target") / "config.json").is_file()


@pytest.mark.parametrize("name", ["/nowhere", "demo://other", "demo://target?widen=3"])
def test_what_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=name.partition("?")[0]):
        resolve(name)


@pytest.mark.parametrize("name", ["/nowhere", "demo://other"])
def test_a_look_at_what_is_here_finds_what_is_missing(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=name):
        local_folder(name)


def test_a_look_asks_no_hub_and_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "snapshot_download", None)
    monkeypatch.setattr(model_source, "widen", None)
    assert local_folder("hf://org/name@0123") is None
    assert local_folder("demo://target?widen=4") == demo.folder("target")


def answer(code: int) -> Any:
    return SimpleNamespace(status_code=code, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LocalEntryNotFoundError("nobody answers"), HubError),
        (ConnectionError("reset"), HubError),
        (HfHubHTTPError("busy", response=answer(503)), HubError),
        (HfHubHTTPError("slower", response=answer(429)), HubError),
        (RepositoryNotFoundError("none", response=answer(404)), ModelNotFoundError),
        (HfHubHTTPError("not yours", response=answer(403)), ModelNotFoundError),
        (HFValidationError("no such name"), ModelNotFoundError),
    ],
)
def test_a_hub_that_may_answer_later_is_told_from_one_that_has_answered(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    def download(*_asked: object, **_how: object) -> str:
        raise error

    monkeypatch.setattr(model_source, "snapshot_download", download)
    with pytest.raises(kind, match="hf://org/name"):
        resolve("hf://org/name@0123")
