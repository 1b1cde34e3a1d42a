"""Checks of an engine's settings that need neither the weights nor the device."""

import torch

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.memory import plan_blocks
from ssd.engine.parallel.shard import Shard, check_shards, model_of
from ssd.errors import SettingsError


def check_engine(model: ModelConfig, engine: EngineConfig) -> None:
    """Refuse settings that cannot work on any machine.

    Devices, CPUs and free memory are known only on the machine where the process runs.

    Raises:
        SettingsError: the kind of device does not exist, or the model cannot be split into
            ``tensor_parallel_size`` parts.
        MemoryBudgetError: ``kv_cache_bytes`` is too small for one sequence.
    """
    try:
        torch.device(engine.device)
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise SettingsError(f"device {engine.device!r} does not exist: {cause}") from error
    size = engine.tensor_parallel_size
    check_shards(model, size)
    if engine.kv_cache_bytes is not None:
        plan_blocks(model_of(model, Shard(0, size)), engine)
