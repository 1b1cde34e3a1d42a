"""The weights of a checkpoint that a target keeps, and the check before a model is loaded."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd.errors import MemoryBudgetError, SettingsError
from ssd.model_files import local_model
from ssd.model_files.local_model import check_model, find_model
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_draft.settings import DraftSettings
from ssd_target.settings import TargetSettings

EMBEDDING = "model.embed_tokens.weight"


def stored(folder: Path, dtype: torch.dtype, **others: torch.dtype) -> str:
    """Write a model, with some tensors in another dtype; returns its folder."""
    path = write_tiny_folder(folder) / "model.safetensors"
    weights = load_file(path)
    save_file({name: x.to(others.get(name, dtype)) for name, x in weights.items()}, path)
    return str(folder)


def test_a_target_in_float32_keeps_weights_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_model, "keeps_bfloat16", lambda _num_weights: True)

    def weights(folder: str, requested: Literal["auto", "same"] = "auto") -> str:
        settings = TargetSettings(
            model=folder, dtype="float32", weights=requested, engine="openvino"
        )
        return find_model(settings, max_num_seqs=1).engine.weights

    kept = stored(tmp_path / "kept", torch.bfloat16)
    assert weights(kept) == "bfloat16"
    assert weights(kept, "same") == "same"
    assert weights(stored(tmp_path / "float32", torch.float32)) == "same"
    assert weights(stored(tmp_path / "float16", torch.float16)) == "same"
    mixed = stored(tmp_path / "mixed", torch.bfloat16, **{EMBEDDING: torch.float32})
    assert weights(mixed) == "same"
    path = Path(stored(tmp_path / "derived", torch.bfloat16)) / "model.safetensors"
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(path) | frequencies, path)
    assert weights(str(path.parent)) == "bfloat16", "a derived tensor in float32 is not read"
    draft = DraftSettings(model=kept, dtype="float32", engine="openvino")
    assert find_model(draft, max_num_seqs=1, branches=4).engine.weights == "same"
    monkeypatch.undo()
    assert weights(kept) == "same", "the model is small"


@pytest.mark.parametrize(
    "device", ["gpu7", "cpu:0", "meta", "cuda:x", "cuda:01", "cuda:200", "cuda:٣"]
)
@pytest.mark.parametrize("settings", [TargetSettings, DraftSettings])
def test_a_device_of_no_machine_is_refused_with_the_settings(
    settings: type[TargetSettings] | type[DraftSettings], device: str
) -> None:
    with pytest.raises(SettingsError, match=f"device is '{device}', must be cpu, cuda or cuda:"):
        settings(device=device)


def test_a_memory_that_holds_no_sequence_is_refused_before_loading(tmp_path: Path) -> None:
    model = str(write_tiny_folder(tmp_path / "model"))
    with pytest.raises(MemoryBudgetError, match="can use 1 bytes"):
        check_model(TargetSettings(model=model, kv_cache_bytes=1), max_num_seqs=1)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:7"])
def test_a_device_of_another_machine_is_accepted(tmp_path: Path, device: str) -> None:
    model = str(write_tiny_folder(tmp_path / "model"))
    check_model(TargetSettings(model=model, device=device), max_num_seqs=1)
