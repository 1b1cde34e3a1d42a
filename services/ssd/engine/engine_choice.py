"""The engine and the dtype to run with: those of the settings, or the fastest of the device.

A GPU has one engine, ``static``. It also runs on CPUs, where it is slow, to be tried and tested.

*Decision*: OpenVINO runs all models on CPUs, in every precision. Torch is the reference with which
tests compare, and runs what OpenVINO cannot: several ranks. *Because*: an OpenVINO pass is one
graph, and eager torch spends half of a small pass between its operations. One AVX-512 core,
embedded pair, context 200: verifies of 1 and 7 rows took 7.0 and 9.2 ms, with torch 14.9 and 15.3.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from ssd.engine.attention.paged import check_paged
from ssd.engine.config import STATIC
from ssd.engine.precision import (
    AUTO,
    Precision,
    Weights,
    choose_precision,
    choose_weights,
    has_bfloat16,
)
from ssd.engine_settings import EngineSettings
from ssd.errors import SettingsError

OPENVINO = "openvino"
TORCH = "torch"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine and a precision, each with the reason of its choice."""

    engine: str
    """``openvino``, ``static`` or ``torch``."""
    reason: str
    """One clause, for logs."""
    precision: Precision
    weights: Weights = "same"


def choose_engine(
    settings: EngineSettings, *, num_weights: int, head_size: int, is_draft: bool
) -> EngineChoice:
    """Return the engine and the precision to run with. The tokens of a draft are guesses.

    Raises:
        SettingsError: the engine cannot run with the other settings or is not installed; or the
            attention backend cannot run with the device, the dtype or the head size.
    """
    choice = _choose(settings, num_weights, is_draft=is_draft)
    if settings.weights in ("int8", "int4") and choice.engine != OPENVINO:
        raise SettingsError(
            f"weights {settings.weights} needs engine openvino, not {choice.engine} "
            f"({choice.reason}); set weights to same"
        )
    if settings.attention != AUTO and choice.engine != STATIC:
        raise SettingsError(
            f"attention {settings.attention} needs engine static, not {choice.engine} "
            f"({choice.reason}); set attention to auto"
        )
    check_paged(settings.attention, settings.device, choice.precision.dtype, head_size)
    return choice


def _choose(settings: EngineSettings, num_weights: int, *, is_draft: bool) -> EngineChoice:
    precision = choose_precision(settings.dtype, settings.device, num_weights)
    if settings.engine == STATIC:
        return EngineChoice(STATIC, "set explicitly", precision)
    if not settings.device.startswith("cpu"):
        if settings.engine != AUTO:
            raise SettingsError(
                f"engine {settings.engine} runs on CPUs, and the device is {settings.device}; set "
                "engine to auto"
            )
        return EngineChoice(STATIC, "the engine of GPUs", precision)
    problem = _openvino_problem(settings)
    if settings.engine == OPENVINO and problem is not None:
        raise SettingsError(f"engine openvino: {problem}; set engine to torch or auto")
    if settings.engine == TORCH or problem is not None:
        if settings.dtype == AUTO:
            precision = Precision("float32", "the engine torch is the reference")
        return EngineChoice(TORCH, problem or "set explicitly", precision)
    reason = "the default on CPUs" if settings.engine == AUTO else "set explicitly"
    weights = choose_weights(settings.weights, is_draft=is_draft, num_weights=num_weights)
    if settings.dtype == AUTO and weights != "same":
        precision = Precision("float32", f"products are {weights}, and the rest takes little time")
    return EngineChoice(OPENVINO, reason, precision, weights)


def _openvino_problem(settings: EngineSettings) -> str | None:
    """Return why the settings or the installation exclude OpenVINO; None if they do not."""
    if settings.num_ranks > 1:
        return f"it runs on one rank, and tensor_parallel_size is {settings.num_ranks}"
    if settings.dtype == "bfloat16" and not has_bfloat16():
        return "dtype is bfloat16, and this CPU has no bfloat16 arithmetic"
    if find_spec("openvino") is None:
        return "the package openvino is not installed"
    return None
