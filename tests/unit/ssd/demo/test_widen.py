import errno
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import RMSNorm

from ssd.demo import widen as widen_module
from ssd.demo.widen import widen, widened_config, widened_tensor
from ssd.engine.config import ModelConfig
from ssd.errors import CacheError, ModelNotFoundError, SettingsError, UnsupportedModelError
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_bench.sampling.model import load_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_tiny_folder(tmp_path / "source")
    generator = torch.Generator().manual_seed(3)
    drawn = {
        name: 0.3 * torch.randn(values.shape, generator=generator)
        for name, values in load_file(folder / "model.safetensors").items()
    }
    save_file(drawn, folder / "model.safetensors")
    return folder


def logits(folder: Path) -> Tensor:
    token_ids_BS = torch.randint(0, 257, (3, 17), generator=torch.Generator().manual_seed(5))
    model = load_model(folder, torch.float64)
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            # Those of transformers compute in float32.
            norm = RMSNorm(module.weight.shape, module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    with torch.inference_mode():
        found: Tensor = model(token_ids_BS).logits
    return found


@pytest.fixture
def wanted(source: Path) -> Tensor:
    return logits(source)


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_a_widened_model_has_the_logits_of_the_original(
    source: Path, wanted: Tensor, tmp_path: Path, factor: int
) -> None:
    found_BSV = logits(widen(source, factor, tmp_path / "models"))
    assert float((found_BSV - wanted).abs().max() / wanted.abs().max()) <= 1e-12


def test_sizes_grow_by_the_factor_and_a_head_keeps_its_own(source: Path, tmp_path: Path) -> None:
    shape = ModelConfig.from_folder(widen(source, 4, tmp_path / "models"))
    assert (shape.hidden_size, shape.intermediate_size) == (128, 256)
    assert (shape.num_heads, shape.num_kv_heads) == (16, 8)
    assert (shape.head_size, shape.num_layers, shape.vocab_size) == (8, 2, 257)


def test_the_tokenizer_is_copied_and_no_temporary_file_remains(
    source: Path, tmp_path: Path
) -> None:
    wider = widen(source, 2, tmp_path / "models")
    assert (wider / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert list((tmp_path / "models").iterdir()) == [wider]


def test_copies_of_a_model_share_one_wider_model_and_others_have_their_own(
    source: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    wider = widen(source, 2, models)
    before = (wider / "model.safetensors").stat().st_mtime_ns
    copy = Path(shutil.copytree(source, tmp_path / "copy" / source.name))
    assert widen(copy, 2, models) == wider
    assert (wider / "model.safetensors").stat().st_mtime_ns == before
    other = write_tiny_folder(tmp_path / "other" / source.name, seed=1)
    assert len({wider, widen(source, 4, models), widen(other, 2, models)}) == 3


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such model folder"):
        widen(tmp_path / "nothing", 2, tmp_path / "models")
    with pytest.raises(UnsupportedModelError, match="'gpt2'"):
        widened_config({"model_type": "gpt2"}, 2)
    # The engine has no biases.
    for name in ("rotary.weight", "q_proj.bias"):
        with pytest.raises(UnsupportedModelError, match=name):
            widened_tensor(f"model.{name}", torch.ones(2), 2)


def test_a_folder_that_cannot_be_written_is_an_error_of_the_settings(
    source: Path, tmp_path: Path
) -> None:
    # A file in place of the folder: it cannot be made, also by root.
    (tmp_path / "cache").write_text("")
    with pytest.raises(SettingsError, match=r"cache: user \d+ cannot write .*; change the owner"):
        widen(source, 2, tmp_path / "cache")


def test_an_error_of_the_source_does_not_name_the_folder_of_wider_models(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copyfile(file: Path, _output: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr("shutil.copyfile", copyfile)
    with pytest.raises(PermissionError):
        widen(source, 2, tmp_path / "cache")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("IoError: StorageFull")]
)
def test_a_full_disk_is_an_error_with_the_fix_and_leaves_no_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def save_file(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(widen_module, "save_file", save_file)
    with pytest.raises(CacheError, match=r"cache: no space is left .*; use a larger volume"):
        widen(source, 2, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_qwen3_keeps_its_head_norms_and_an_untied_head_is_repeated() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    assert widened_config(config, 2)["head_dim"] == 8
    norm_E = torch.rand(8)
    assert torch.equal(widened_tensor("model.layers.0.self_attn.q_norm.weight", norm_E, 2), norm_E)
    assert widened_tensor("lm_head.weight", torch.ones(5, 16), 2).shape == (5, 32)
