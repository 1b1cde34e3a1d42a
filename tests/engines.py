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


def paged(
    rows: Sequence[tuple[Sequence[int], int, Tensor]], num_columns: int, padding: Tensor | int = 0
) -> PagedBatch:
    """A batch of (tokens, first position, block table); the rest of its columns is ``padding``."""
    tokens_BP = torch.as_tensor(padding).expand(len(rows), num_columns).clone()
    for row_P, (tokens, _, _) in zip(tokens_BP, rows, strict=True):
        row_P[: len(tokens)] = torch.tensor(tokens)
    firsts, counts = ([first for _, first, _ in rows], [len(tokens) for tokens, _, _ in rows])
    tables_BJ = torch.stack([blocks_J for _, _, blocks_J in rows])
    return PagedBatch(tokens_BP, torch.tensor(firsts), torch.tensor(counts), tables_BJ)


def store(runner: ModelRunner, tokens: Sequence[int], blocks_J: Tensor) -> None:
    """Prefill a text into the pages of a block table, chunk by chunk."""
    chunk = runner.engine.prefill_chunk
    for first in range(0, len(tokens), chunk):
        runner.prefill(paged([(tokens[first : first + chunk], first, blocks_J)], chunk))
