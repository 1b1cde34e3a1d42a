"""Verifies of one sequence with compiled layers, against the same weights without."""

from dataclasses import replace

import torch
from torch import Tensor

from ssd.engine.attention.paged import make_paged
from ssd.engine.batch import PagedBatch
from ssd.engine.capture import capture_of
from ssd.engine.compiler import has_c_compiler
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.decoder import Decoder
from ssd.engine.models.decoder_weights import DecoderWeights
from ssd.engine.models.registry import open_weights
from ssd.engine.precision import DTYPES
from ssd.engine.static_execution import StaticTarget, make_execution
from ssd.engine.target_runner import TargetRunner
from ssd.local_model import find_model
from ssd_bench.gpu_check.checkpoints import llama_pair
from ssd_bench.gpu_check.models import (
    LARGEST_DIFFERENCE,
    block_tables,
    release_memory,
    target_settings,
)
from ssd_bench.gpu_check.outcome import Environment, Figure, SkipError, WrongResultError
from ssd_bench.gpu_check.passes import verify_seconds


def check_compiled_layers(environment: Environment) -> dict[str, Figure]:
    """Compare logits and times of the target of ``llama_pair``.

    Raises:
        SkipError: there is no C compiler.
        WrongResultError: the logits differ.
    """
    if environment.is_cuda and not has_c_compiler():
        raise SkipError("compiled layers need a C compiler, and there is neither cc nor gcc")
    folder = llama_pair(environment).target
    local = find_model(target_settings(str(folder), environment, 1), max_num_seqs=1)
    model, engine = ModelConfig.from_folder(folder), local.engine
    dtype = DTYPES[engine.dtype]
    weights, _ = open_weights(folder, model, dtype, engine.device, lambda _fraction: None)
    # Both models read the layers, which can be iterated once.
    layers = list(weights.layers)
    eager_PV, eager = _measure(
        model, engine, replace(weights, layers=iter(layers)), environment, is_compiled=False
    )
    found_PV, compiled = _measure(
        model, engine, replace(weights, layers=iter(layers)), environment, is_compiled=True
    )
    difference = float((found_PV - eager_PV).norm() / eager_PV.norm())
    if not difference <= LARGEST_DIFFERENCE[engine.dtype]:
        raise WrongResultError(
            f"logits of compiled layers differ by {difference:.3g} of their norm; allowed: "
            f"{LARGEST_DIFFERENCE[engine.dtype]}"
        )
    return {
        "relative_difference": difference,
        "verify_1_ms": round(eager * 1000, 3),
        "verify_1_compiled_ms": round(compiled * 1000, 3),
        "verify_1_compiled_over_eager": round(compiled / eager, 3),
    }


def _measure(
    model: ModelConfig,
    engine: EngineConfig,
    weights: DecoderWeights,
    environment: Environment,
    *,
    is_compiled: bool,
) -> tuple[Tensor, float]:
    """Return logits [P, V] of tokens without a context, on the CPU, and the time of a verify."""
    release_memory()
    decoder = Decoder(model, weights, is_compiled=is_compiled)
    attention = make_paged(engine.attention, engine.device, engine.dtype).attention
    capture = capture_of(engine.device)
    execution = make_execution(decoder, model, engine, attention, capture)
    assert isinstance(execution, StaticTarget)
    runner = TargetRunner(execution, model, engine)
    tokens_1P = torch.arange(engine.num_columns)[None] * 37 % model.vocab_size
    zero_1 = torch.zeros(1, dtype=torch.int64)
    tables_1J = block_tables(1, engine.num_columns, engine.block_size)
    batch = PagedBatch(tokens_1P, zero_1, zero_1 + engine.num_columns, tables_1J)
    logits_PV = runner.forward(batch)[0].to("cpu", copy=True)
    return logits_PV, verify_seconds(runner, 1, environment)
