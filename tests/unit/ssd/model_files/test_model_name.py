"""Names of models, looked up without a download."""

from pathlib import Path

import pytest

from ssd import demo
from ssd.errors import ModelNotFoundError
from ssd.model_files.model_name import HubModel, local_folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/nowhere", "/nowhere: there is no such folder"),
        ("demo://other", "demo://other"),
        ("demo://target?widen=3", "demo://target"),
        ("a" * 300, r"aaa: (File name too long|there is no such)"),
        ("Qwen/Qwen3-0.6B", r"on the hub, use hf://Qwen/Qwen3-0.6B$"),
    ],
)
def test_a_missing_model_is_named_with_the_cause_or_a_hint(name: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        local_folder(name)


def test_a_folder_without_a_model_is_another_error_than_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config.json in this folder"):
        local_folder(str(tmp_path))


@pytest.mark.parametrize("path", ["./org/name", "../name", "/org/name", "org/name/more"])
def test_a_missing_path_gets_no_hint_of_the_hub(path: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"use a model folder, .* or hf://org/name$"):
        local_folder(path)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("m.gguf", "GGUF is not supported; use the same model as safetensors"),
        ("pytorch_model.bin", "pickled weights are not read, .*; save the model as safetensors"),
        ("model.safetensors", "this is a file; use the folder that contains it"),
    ],
)
def test_a_file_of_weights_is_refused_with_what_to_use_instead(
    tmp_path: Path, file: str, words: str
) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ModelNotFoundError, match=f"{file}: {words}"):
        local_folder(str(tmp_path / file))


def test_a_folder_with_a_refused_format_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"m\.gguf: GGUF is not supported"):
        local_folder(str(tmp_path))


def test_a_wider_model_has_the_folder_of_the_packaged_one() -> None:
    assert local_folder("demo://target?widen=4") == demo.folder("target")


def test_a_model_on_the_hub_has_no_local_folder() -> None:
    assert local_folder("hf://org/name@0123") is None
    assert HubModel.parse("hf://org/name@0123") == HubModel("org/name", "0123")
    assert HubModel.parse("hf://org/name") == HubModel("org/name", None)
