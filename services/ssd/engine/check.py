"""Checks of an engine's settings that need neither the weights nor the device."""

import re

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.memory import plan_blocks
from ssd.engine.parallel.shard import Shard, check_shards, model_of
from ssd.errors import SettingsError

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


def check_engine(model: ModelConfig, engine: EngineConfig) -> None:
    """Refuse settings that cannot work on any machine.

    Devices, CPUs and free memory are known only on the machine where the process runs.

    Raises:
        SettingsError: the kind of device does not exist, or the model cannot be split into
            ``tensor_parallel_size`` parts.
        MemoryBudgetError: ``kv_cache_bytes`` is too small for one sequence.
    """
    if not _DEVICE.fullmatch(engine.device):
        raise SettingsError(f"device is {engine.device!r}, must be cpu, cuda or cuda:NUMBER")
    size = engine.tensor_parallel_size
    check_shards(model, size)
    if engine.kv_cache_bytes is not None:
        plan_blocks(model_of(model, Shard(0, size)), engine)
