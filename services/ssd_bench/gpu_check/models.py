"""Models of this product in the process of a check, and their logits against transformers."""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ssd.engine.batch import PagedBatch
from ssd.engine.config import DTYPE_BYTES
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.precision import DTYPES
from ssd.engine.runner import AnyRunner, load_runner
from ssd.engine.target_runner import TargetRunner
from ssd.engine_settings import EngineSettings
from ssd.local_model import find_model
from ssd_bench.gpu_check.checkpoints import Pair, llama_pair, qwen3_pair
from ssd_bench.gpu_check.outcome import Environment, Figure, WrongResultError
from ssd_draft.settings import DraftSettings
from ssd_target.settings import TargetSettings

LOOKAHEAD = 7
MAX_MODEL_LEN = 1024
STATIC: Literal["static"] = "static"
"""The engine of GPUs, which also runs on CPUs."""
DTYPE_OF: Mapping[str, Literal["bfloat16", "float32"]] = {"cuda": "bfloat16", "cpu": "float32"}
LARGEST_DIFFERENCE = {"bfloat16": 0.03, "float32": 1e-4}
"""Root of the mean squared difference, divided by that of the logits of transformers."""


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


def release_memory() -> None:
    """Free the device memory of models that nothing refers to, except in cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def block_tables(num_sequences: int, num_tokens: int, block_size: int) -> Tensor:
    """Return tables of own blocks for sequences of some length; block 0 is not used."""
    blocks_each = -(-num_tokens // block_size)
    return 1 + torch.arange(num_sequences * blocks_each).view(num_sequences, blocks_each)


def check_llama_logits(environment: Environment) -> dict[str, Figure]:
    """Compare the target of ``llama_pair`` with transformers."""
    return _check_logits(llama_pair, environment)


def check_qwen3_logits(environment: Environment) -> dict[str, Figure]:
    """Compare the target of ``qwen3_pair`` with transformers."""
    return _check_logits(qwen3_pair, environment)


def _check_logits(
    pair: Callable[[Environment], Pair], environment: Environment
) -> dict[str, Figure]:
    folder = pair(environment).target
    runner = open_target(folder, environment, max_num_seqs=1)
    num_columns = runner.engine.num_columns
    tokens_1P = torch.arange(num_columns)[None] * 37 % runner.model.vocab_size
    zero_1 = torch.zeros(1, dtype=torch.int64)
    tables_1J = block_tables(1, num_columns, runner.engine.block_size)
    batch = PagedBatch(tokens_1P, zero_1, zero_1 + num_columns, tables_1J)
    found_PV = runner.forward(batch)[0].cpu()
    dtype = runner.engine.dtype
    weights_gb = runner.num_parameters * DTYPE_BYTES[dtype] / 1e9
    del runner
    release_memory()
    expected_PV = _of_transformers(folder, tokens_1P, dtype, environment)
    difference = float((found_PV - expected_PV).norm() / expected_PV.norm())
    if not difference <= LARGEST_DIFFERENCE[dtype]:
        raise WrongResultError(
            f"logits in {dtype} differ from those of transformers by {difference:.3g} of their "
            f"norm; allowed: {LARGEST_DIFFERENCE[dtype]}"
        )
    agree = found_PV.argmax(-1) == expected_PV.argmax(-1)
    return {
        "dtype": dtype,
        "weights_gb": round(weights_gb, 2),
        "relative_difference": difference,
        "best_tokens_agree": f"{int(agree.sum())} of {num_columns}",
    }


def open_transformers(folder: Path, dtype: str, environment: Environment) -> Any:
    """Load a folder as a model of transformers on the device of a target."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    return model.to(torch.device(environment.target_device))


def _of_transformers(
    folder: Path, tokens_1P: Tensor, dtype: str, environment: Environment
) -> Tensor:
    model = open_transformers(folder, dtype, environment)
    with torch.inference_mode():
        logits_1PV: Tensor = model(tokens_1P.to(environment.target_device)).logits
    return logits_1PV[0].float().cpu()
