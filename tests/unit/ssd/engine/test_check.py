from pathlib import Path

import pytest

from ssd.engine.check import check_engine
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.errors import MemoryBudgetError, SettingsError, SetupError
from ssd.testing.tiny_folder import write_tiny_folder


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig.from_folder(write_tiny_folder(tmp_path / "model"))


@pytest.mark.parametrize(
    ("engine", "error", "words"),
    [
        (EngineConfig(max_model_len=64, attention="cqu"), SettingsError, "attention: 'cqu'"),
        (EngineConfig(max_model_len=64, device="gpu7"), SettingsError, "'gpu7' does not exist"),
        (EngineConfig(max_model_len=64, kv_cache_bytes=1), MemoryBudgetError, "may take 1 bytes"),
    ],
)
def test_what_would_work_nowhere_is_refused_before_anything_is_loaded(
    model: ModelConfig, engine: EngineConfig, error: type[SetupError], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_engine(model, engine)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:7"])
def test_a_device_that_is_elsewhere_is_nothing_to_refuse(model: ModelConfig, device: str) -> None:
    check_engine(model, EngineConfig(max_model_len=64, device=device))
