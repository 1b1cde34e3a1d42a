"""Reads a model folder into a graph."""

from collections.abc import Callable
from pathlib import Path

import torch

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.weights import open_weights
from ssd.engine.openvino_engine.draft import OpenVinoDraft
from ssd.engine.openvino_engine.target import OpenVinoTarget
from ssd.engine.parallel.group import Group
from ssd.engine.precision import DTYPES


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
    if engine.weights == "bfloat16":
        dtype = torch.bfloat16
    weights = open_weights(folder, model, dtype, engine.device, on_progress)
    kind = OpenVinoDraft if engine.branches else OpenVinoTarget
    return kind(weights, model, engine)
