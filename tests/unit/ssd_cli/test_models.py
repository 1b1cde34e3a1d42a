"""Model folders, read without loading a weight."""

from pathlib import Path

import pytest

from ssd.testing.tiny_folder import write_tiny_folder
from ssd_cli.models import local_models, models_table


def found(*roots: Path, hub: Path) -> dict[str, int]:
    models = local_models(roots, hub)
    return {m.name: m.num_parameters for m in models if not m.name.startswith("demo://")}


def test_models_in_and_below_a_folder_are_counted_from_their_headers(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "models" / "a")
    names = found(tmp_path / "models", tmp_path / "models" / "a", hub=tmp_path / "none")
    attention, mlp, norms = 32 * 32 * 2 + 16 * 32 * 2, 3 * 64 * 32, 2 * 32
    assert names == {str(tmp_path / "models" / "a"): 257 * 32 + 32 + 2 * (attention + mlp + norms)}
    models = local_models([tmp_path / "models"], tmp_path)
    assert models_table(models).row_count == len(models)


def test_downloaded_models_are_named_as_the_target_flag_takes_them(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "models--org--name" / "snapshots" / "abc")
    assert list(found(hub=tmp_path)) == ["hf://org/name@abc"]


@pytest.mark.parametrize("config", ["{", "[]", '{"model_type": "gpt2"}', '{"model_type": [1]}'])
def test_a_folder_that_is_no_model_of_ours_is_left_out(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert found(tmp_path, hub=tmp_path) == {}


@pytest.mark.parametrize("weights", [b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0{"])
def test_damaged_weights_leave_a_model_out(tmp_path: Path, weights: bytes) -> None:
    write_tiny_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert found(tmp_path, hub=tmp_path) == {}
