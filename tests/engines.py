"""The engines of a CPU, for tests that run on each of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.runner import AnyRunner, ModelRunner, load_runner

CPU_ENGINES = ("torch", "openvino", "static")
PlainLogits = Callable[[Sequence[int]], Tensor]
"""Logits [R, V] after each token of a text."""


def on(name: str, engine: EngineConfig) -> EngineConfig:
    """The same settings for one of ``CPU_ENGINES``."""
    if name == "openvino":
        return replace(engine, engine="openvino", block_size=32)
    if name == "static":
        return replace(engine, engine="static")
    return engine


def inside(runner: ModelRunner) -> Any:
    """The execution of a runner, whose model and entries a test reads."""
    return runner.execution


def load(kind: type[AnyRunner], folder: Path, engine: EngineConfig) -> AnyRunner:
    """A runner of a model; its progress is not reported."""
    return load_runner(kind, folder, engine, lambda _stage, _fraction: None)


def store(runner: ModelRunner, tokens: Sequence[int], blocks_J: Tensor) -> None:
    """Prefill a text into the pages of a block table, chunk by chunk."""
    chunk = runner.engine.prefill_chunk
    for first in range(0, len(tokens), chunk):
        piece = torch.tensor(tokens[first : first + chunk])
        tokens_1P = torch.zeros((1, chunk), dtype=torch.int64)
        tokens_1P[0, : len(piece)] = piece
        first_1, count_1 = torch.tensor([first]), torch.tensor([len(piece)])
        runner.prefill(PagedBatch(tokens_1P, first_1, count_1, blocks_J[None]))
