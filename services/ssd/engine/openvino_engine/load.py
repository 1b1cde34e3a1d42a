"""Reads a model folder into a graph."""

from collections.abc import Callable
from pathlib import Path

from ssd.engine.config import DTYPES, EngineConfig, ModelConfig
from ssd.engine.memory import allocate_storage, plan_blocks
from ssd.engine.models.registry import open_weights
from ssd.engine.openvino_engine.draft import OpenVinoDraft
from ssd.engine.openvino_engine.target import OpenVinoTarget


def load(
    folder: Path, model: ModelConfig, engine: EngineConfig, on_progress: Callable[[float], None]
) -> OpenVinoTarget | OpenVinoDraft:
    """See ``execution.load_execution``."""
    dtype = DTYPES[engine.dtype]
    weights, reader = open_weights(folder, model, dtype, engine.device, on_progress)
    execution: OpenVinoTarget | OpenVinoDraft
    if engine.branches:
        execution = OpenVinoDraft(weights, model, engine, allocate_storage(model, engine))
    else:
        execution = OpenVinoTarget(weights, model, engine, plan_blocks(model, engine, dtype))
    execution.num_parameters = reader.num_parameters
    return execution
