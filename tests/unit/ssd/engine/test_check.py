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
        *(
            (EngineConfig(max_model_len=64, device=device), SettingsError, "cpu, cuda or cuda:")
            for device in ("gpu7", "cpu:0", "meta", "cuda:x", "cuda:01", "cuda:200", "cuda:٣")
        ),
        (EngineConfig(max_model_len=64, kv_cache_bytes=1), MemoryBudgetError, "can use 1 bytes"),
    ],
)
def test_settings_that_work_on_no_machine_are_refused_before_loading(
    model: ModelConfig, engine: EngineConfig, error: type[SetupError], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_engine(model, engine)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:7"])
def test_a_device_of_another_machine_is_accepted(model: ModelConfig, device: str) -> None:
    check_engine(model, EngineConfig(max_model_len=64, device=device))
