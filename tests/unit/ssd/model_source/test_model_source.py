"""Names of models and the folders behind them."""

from pathlib import Path

import pytest

from ssd.errors import ModelNotFoundError
from ssd.model_source import resolve
from ssd.testing.tiny_folder import write_tiny_folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(write_tiny_folder(tmp_path / "model"))) == tmp_path / "model"


def test_the_embedded_pair_needs_no_download() -> None:
    assert (resolve("demo://target") / "config.json").is_file()


@pytest.mark.parametrize("name", ["/nowhere", "demo://other", "demo://target?widen=3"])
def test_what_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=name.partition("?")[0]):
        resolve(name)
