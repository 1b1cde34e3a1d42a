"""Problems of model folders that end no list of models, and block none."""

import json
import os
from pathlib import Path

import pytest

from ssd.model_files.folder_contents import problem_of, read_model
from ssd.testing.tiny_folder import write_tiny_folder


def test_a_whole_model_has_no_problem_and_a_folder_without_config_is_none(tmp_path: Path) -> None:
    assert problem_of(write_tiny_folder(tmp_path / "model")) == ""
    assert read_model("name", tmp_path) is None
    assert problem_of(tmp_path) == ""


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("n" * 300, " is missing; model.safetensors.index.json names it"),
        ("../model.safetensors", " no name of a file in this folder"),
        ("/model.safetensors", " no name of a file in this folder"),
    ],
)
def test_a_wrong_index_is_a_problem_of_its_model(tmp_path: Path, file: str, problem: str) -> None:
    (write_tiny_folder(tmp_path) / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    assert problem in problem_of(tmp_path)


def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    weights = write_tiny_folder(tmp_path) / "model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    assert problem_of(tmp_path).startswith(f"{weights} is not a file")
