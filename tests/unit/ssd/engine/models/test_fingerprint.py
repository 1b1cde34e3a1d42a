import json
import shutil
from pathlib import Path

import pytest

from ssd import demo
from ssd.engine.models import fingerprint as module
from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.errors import WeightsError
from ssd.testing.tiny_folder import write_tiny_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "model")


def test_a_copy_with_another_tokenizer_has_the_same_fingerprint(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "volume" / "other-name"
    shutil.copytree(folder, copy)
    (copy / "tokenizer.json").write_text("{}")
    (copy / "README.md").write_text("more")
    assert weights_fingerprint(copy) == weights_fingerprint(folder)
    assert weights_fingerprint(folder).startswith("sha256:")
    assert len(weights_fingerprint(folder)) == len("sha256:") + 64


def test_a_change_of_the_configuration_or_of_a_value_changes_the_fingerprint(folder: Path) -> None:
    found = {weights_fingerprint(folder)}
    weights = folder / "model.safetensors"
    for place in (-1, weights.stat().st_size // 2):
        content = bytearray(weights.read_bytes())
        content[place] ^= 1
        weights.write_bytes(content)
        found.add(weights_fingerprint(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1.5}))
    found.add(weights_fingerprint(folder))
    assert len(found) == 4


def test_target_and_draft_have_different_fingerprints() -> None:
    target, draft = (weights_fingerprint(demo.folder(name)) for name in demo.NAMES)
    assert target != draft


def test_samples_of_a_large_file_include_its_first_and_last_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAMPLE_BYTES", 100)
    weights = folder / "model.safetensors"
    assert weights.stat().st_size > 100 * module.SAMPLES
    before = weights_fingerprint(folder)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert weights_fingerprint(folder) != before


def test_a_file_of_the_index_that_is_missing_is_an_error_of_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="model-00001"):
        weights_fingerprint(folder)
