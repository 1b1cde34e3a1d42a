"""What can be held against an engine's settings on any machine, before anything is loaded."""

import torch

from ssd.engine.attention.backend import make_backend
from ssd.engine.config import DTYPES, EngineConfig, ModelConfig
from ssd.engine.memory import plan_blocks
from ssd.errors import SettingsError


def check_engine(model: ModelConfig, engine: EngineConfig) -> None:
    """Refuse what would work nowhere: no weights are read and no device is touched.

    Which devices, CPUs and free memory a process gets is known only where it runs.

    Raises:
        SettingsError: an attention backend or a kind of device that does not exist.
        MemoryBudgetError: ``kv_cache_bytes`` is too little for one sequence.
    """
    make_backend(engine.attention)
    try:
        torch.device(engine.device)
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise SettingsError(f"device {engine.device!r} does not exist: {cause}") from error
    if engine.kv_cache_bytes is not None:
        plan_blocks(model, engine, DTYPES[engine.dtype])
