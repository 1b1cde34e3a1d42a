"""Logits of verifies: against transformers, and of compiled layers against eager ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.gpu.checkpoints import Pair, llama_pair, qwen3_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.models import (
    attention_of,
    first_logits,
    first_tokens,
    open_target,
    open_transformers,
    release_memory,
    target_settings,
)
from tests.gpu.test_passes import verify_seconds
from torch import Tensor

from ssd.engine.capture import capture_of
from ssd.engine.compiler import has_c_compiler
from ssd.engine.config import DTYPE_BYTES, EngineConfig, ModelConfig
from ssd.engine.models.decoder import Decoder
from ssd.engine.models.weights import DecoderWeights, open_weights
from ssd.engine.precision import DTYPES
from ssd.engine.static_execution import StaticTarget, make_execution
from ssd.engine.target_runner import TargetRunner
from ssd.model_files.local_model import find_model

LARGEST_DIFFERENCE = {"bfloat16": 0.03, "float32": 1e-4}
"""Root of the mean squared difference, divided by that of the expected logits."""


@pytest.mark.check("logits of llama")
def test_logits_of_llama_are_those_of_transformers(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    figures |= compare_with_transformers(llama_pair, environment)


@pytest.mark.check("logits of qwen3")
def test_logits_of_qwen3_are_those_of_transformers(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    figures |= compare_with_transformers(qwen3_pair, environment)


def test_wrong_logits_fail(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TargetRunner.forward
    monkeypatch.setattr(TargetRunner, "forward", lambda *batch: right(*batch) * 1.01)
    with pytest.raises(AssertionError, match=r"differ by 0\.01"):
        compare_with_transformers(qwen3_pair, environment)


def compare_with_transformers(
    pair: Callable[[Environment], Pair], environment: Environment
) -> dict[str, Figure]:
    """Compare the target of a pair."""
    folder = pair(environment).target
    runner = open_target(folder, environment, max_num_seqs=1)
    found_PV, dtype = first_logits(runner), runner.engine.dtype
    tokens_1P = first_tokens(runner.model, len(found_PV))
    weights_gb = runner.num_parameters * DTYPE_BYTES[dtype] / 1e9
    del runner
    release_memory()
    expected_PV = _of_transformers(folder, tokens_1P, dtype, environment)
    difference = compared(found_PV, expected_PV, dtype)
    agree = found_PV.argmax(-1) == expected_PV.argmax(-1)
    return {
        "dtype": dtype,
        "weights_gb": round(weights_gb, 2),
        "relative_difference": difference,
        "best_tokens_agree": f"{int(agree.sum())} of {len(found_PV)}",
    }


def compared(found_PV: Tensor, expected_PV: Tensor, dtype: str) -> float:
    """Return the relative difference of logits, which must be small."""
    difference = float((found_PV - expected_PV).norm() / expected_PV.norm())
    allowed = LARGEST_DIFFERENCE[dtype]
    assert difference <= allowed, (
        f"logits in {dtype} differ by {difference:.3g} of their norm; allowed: {allowed}"
    )
    return difference


def _of_transformers(
    folder: Path, tokens_1P: Tensor, dtype: str, environment: Environment
) -> Tensor:
    model = open_transformers(folder, dtype, environment)
    with torch.inference_mode():
        logits_1PV: Tensor = model(tokens_1P.to(environment.target_device)).logits
    return logits_1PV[0].float().cpu()


@pytest.mark.check("compiled layers of llama")
def test_compiled_layers_have_the_logits_of_eager_ones(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    if environment.is_cuda and not has_c_compiler():
        pytest.skip("compiled layers need a C compiler, and there is neither cc nor gcc")
    folder = llama_pair(environment).target
    engine = find_model(target_settings(str(folder), environment, 1), max_num_seqs=1).engine
    model, dtype = ModelConfig.from_folder(folder), DTYPES[engine.dtype]
    weights = open_weights(folder, model, dtype, engine.device, lambda _fraction: None)
    # Both models read the layers, which can be iterated once.
    layers = list(weights.layers)
    (eager_PV, eager), (found_PV, compiled) = (
        _with_layers(
            model, engine, replace(weights, layers=iter(layers)), environment, is_compiled=each
        )
        for each in (False, True)
    )
    figures |= {
        "relative_difference": compared(found_PV, eager_PV, engine.dtype),
        "verify_1_ms": round(eager * 1000, 3),
        "verify_1_compiled_ms": round(compiled * 1000, 3),
        "verify_1_compiled_over_eager": round(compiled / eager, 3),
    }


def _with_layers(
    model: ModelConfig,
    engine: EngineConfig,
    weights: DecoderWeights,
    environment: Environment,
    *,
    is_compiled: bool,
) -> tuple[Tensor, float]:
    """Return the first logits [P, V], and the time of a verify."""
    release_memory()
    decoder = Decoder(model, weights, is_compiled=is_compiled)
    capture = capture_of(engine.device)
    execution = make_execution(decoder, engine, attention_of(engine, model), capture)
    assert isinstance(execution, StaticTarget)
    runner = TargetRunner(execution, model, engine)
    return first_logits(runner), verify_seconds(runner, 1, environment)
