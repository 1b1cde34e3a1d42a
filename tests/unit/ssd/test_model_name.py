"""Names of models, looked up without a download."""

from pathlib import Path

import pytest

from ssd import demo
from ssd.errors import ModelNotFoundError
from ssd.model_name import HubModel, local_folder


@pytest.mark.parametrize("name", ["/nowhere", "demo://other", "demo://target?widen=3"])
def test_a_missing_model_is_named(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=name.partition("?")[0]):
        local_folder(name)


def test_a_missing_folder_and_a_folder_without_a_model_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such folder"):
        local_folder(str(tmp_path / "none"))
    with pytest.raises(ModelNotFoundError, match=r"no config.json in this folder"):
        local_folder(str(tmp_path))


def test_a_wider_model_has_the_folder_of_the_packaged_one() -> None:
    assert local_folder("demo://target?widen=4") == demo.folder("target")


def test_a_model_on_the_hub_has_no_local_folder() -> None:
    assert local_folder("hf://org/name@0123") is None
    assert HubModel.parse("hf://org/name@0123") == HubModel("org/name", "0123")
    assert HubModel.parse("hf://org/name") == HubModel("org/name", None)
