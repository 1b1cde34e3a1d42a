"""Models of this product in the process of a check, and the time of their work."""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from tests.gpu.environment import Environment
from torch import Tensor
from transformers import AutoModelForCausalLM

from ssd.engine.attention.paged import PagedAttention, make_paged
from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.precision import DTYPES
from ssd.engine.runner import AnyRunner, load_runner
from ssd.engine.target_runner import TargetRunner
from ssd.engine_settings import EngineSettings
from ssd.model_files.local_model import find_model
from ssd_draft.settings import DraftSettings
from ssd_target.settings import TargetSettings

WARM_UP_RUNS = 3
RUNS = {"cuda": 20, "cpu": 3}
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
LOOKAHEAD = 7
MAX_MODEL_LEN = 1024
STATIC: Literal["static"] = "static"
"""The engine of GPUs, which also runs on CPUs."""
DTYPE_OF: Mapping[str, Literal["bfloat16", "float32"]] = {"cuda": "bfloat16", "cpu": "float32"}


def target_settings(model: str, environment: Environment, max_num_seqs: int) -> TargetSettings:
    """Return settings of a target on the device, with the engine of GPUs."""
    return TargetSettings(
        model=model,
        device=environment.target_device,
        engine=STATIC,
        dtype=DTYPE_OF[environment.device],
        lookahead=LOOKAHEAD,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
    )


def draft_settings(
    model: str, environment: Environment, max_sessions: int, branches: int
) -> DraftSettings:
    """Return settings of a draft on the device, with the engine of GPUs."""
    return DraftSettings(
        model=model,
        device=environment.target_device,
        engine=STATIC,
        dtype=DTYPE_OF[environment.device],
        lookahead=LOOKAHEAD,
        branches=branches,
        max_model_len=MAX_MODEL_LEN,
        max_sessions=max_sessions,
    )


def open_target(folder: Path, environment: Environment, max_num_seqs: int) -> TargetRunner:
    """Load and warm up a target."""
    settings = target_settings(str(folder), environment, max_num_seqs)
    return _open(TargetRunner, settings, max_num_seqs, 0)


def open_draft(
    folder: Path, environment: Environment, max_sessions: int, branches: int
) -> DraftRunner:
    """Load and warm up a draft."""
    settings = draft_settings(str(folder), environment, max_sessions, branches)
    return _open(DraftRunner, settings, max_sessions, branches)


def _open(
    kind: type[AnyRunner], settings: EngineSettings, max_num_seqs: int, branches: int
) -> AnyRunner:
    model = find_model(settings, max_num_seqs=max_num_seqs, branches=branches)
    runner = load_runner(kind, model.folder, model.engine, lambda _stage, _fraction: None)
    runner.warm_up(lambda _stage, _fraction: None)
    return runner


def attention_of(engine: EngineConfig, model: ModelConfig) -> PagedAttention:
    """Return the attention with which the engine of GPUs runs a model."""
    return make_paged(
        engine.attention,
        engine.device,
        engine.dtype,
        head_size=model.head_size,
        is_deterministic=not engine.branches,
    ).attention


def release_memory() -> None:
    """Free the device memory of models that nothing refers to, except in cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def first_logits(runner: TargetRunner) -> Tensor:
    """Return the logits [P, V] of a verify of P tokens without a context, on the CPU."""
    num_columns = runner.engine.num_columns
    zero_1 = torch.zeros(1, dtype=torch.int64)
    tables_1J = block_tables(1, num_columns, runner.engine.block_size)
    tokens_1P = first_tokens(runner.model, num_columns)
    batch = PagedBatch(tokens_1P, zero_1, zero_1 + num_columns, tables_1J)
    return runner.forward(batch)[0].to("cpu", copy=True)


def first_tokens(model: ModelConfig, num_tokens: int) -> Tensor:
    """Return the token ids [1, P] of ``first_logits``."""
    return torch.arange(num_tokens)[None] * 37 % model.vocab_size


def block_tables(num_sequences: int, num_tokens: int, block_size: int) -> Tensor:
    """Return tables of own blocks for sequences of some length; block 0 is not used."""
    blocks_each = -(-num_tokens // block_size)
    return 1 + torch.arange(num_sequences * blocks_each).view(num_sequences, blocks_each)


def open_transformers(folder: Path, dtype: str, environment: Environment) -> Any:
    """Load a folder as a model of transformers on the device of a target."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    return model.to(torch.device(environment.target_device))


def device_seconds(
    work: Callable[[], object],
    environment: Environment,
    on_device: Callable[[], float | None] = lambda: None,
) -> float:
    """Return the median time of a run.

    Args:
        work: the run.
        environment: contains the device.
        on_device: returns the time of the last run on the device; None: the time from the start of
            the run on the host to its end on the device is used.
    """
    for _ in range(WARM_UP_RUNS):
        work()
    times = []
    for _ in range(RUNS[environment.device]):
        _synchronize(environment)
        started = perf_counter()
        work()
        _synchronize(environment)
        elapsed, seconds = perf_counter() - started, on_device()
        times.append(elapsed if seconds is None else seconds)
    return median(times)


def _synchronize(environment: Environment) -> None:
    if environment.is_cuda:
        torch.cuda.synchronize()


def copy_bandwidth(environment: Environment) -> float:
    """Return the bytes that a large copy reads and writes in a second."""
    size = COPY_BYTES[environment.device]
    source = torch.zeros(size, dtype=torch.uint8, device=environment.target_device)
    copied = torch.empty_like(source)
    return 2 * size / device_seconds(lambda: copied.copy_(source), environment)
