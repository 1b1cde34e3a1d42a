"""Reads a model folder into a graph."""

from collections.abc import Callable
from pathlib import Path

import torch

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.registry import open_weights
from ssd.engine.models.weights import is_bfloat16
from ssd.engine.openvino_engine.draft import OpenVinoDraft
from ssd.engine.openvino_engine.target import OpenVinoTarget
from ssd.engine.parallel.group import Group
from ssd.engine.precision import DTYPES, keeps_bfloat16
from ssd.engine.sizes import num_weights


def load(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    on_progress: Callable[[float], None],
    group: Group,
) -> OpenVinoTarget | OpenVinoDraft:
    """See ``execution.load_execution``."""
    assert group.shard.is_whole, group.shard
    dtype = DTYPES[engine.dtype]
    if not engine.branches and keeps_bfloat16(num_weights(model)) and is_bfloat16(folder):
        dtype = torch.bfloat16
    weights, reader = open_weights(folder, model, dtype, engine.device, on_progress)
    kind = OpenVinoDraft if engine.branches else OpenVinoTarget
    execution = kind(weights, model, engine)
    execution.num_parameters = reader.num_parameters
    return execution
