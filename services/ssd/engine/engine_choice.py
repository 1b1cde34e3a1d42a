"""The engine and the dtype to run with: those of the settings, or the fastest of the device.

A GPU has one engine, ``static``. It also runs on CPUs, where it is slow, to be tried and tested.

*Decision*: ``auto`` is OpenVINO on a CPU in float32, else torch; a model below ``SMALL_MODEL`` is
float32 on every CPU. *Because*: an OpenVINO pass is one graph, and eager torch spends half of a
small pass between its operations. One AVX-512 core, embedded pair, context 200: verifies of 1 and 7
rows took 7.0 and 9.2 ms, with torch 14.9 and 15.3; a step of 24 branches 1.6 ms, with torch 3.4.
On a CPU with AVX512-BF16, OpenVINO in float32 against torch in bfloat16 (two cores of a busy
machine, fastest of three, ms at 1 and 7 rows): 14M weights 4.6 and 4.7 against 7.3 and 7.2, 50M
11.8 and 15.7 against 15.6 and 13.6, 208M 35.5 and 46.7 against 49.7 and 37.1. *Not chosen*:
float32 for larger models on such CPUs, whose verifies are slower and which need twice the memory;
bfloat16 in OpenVINO, where the equality of bits for every number of rows has not been measured.
*Revisit when* it has been, or on a CPU with AMX.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from ssd.engine.attention.backend import AUTO as AUTO_ATTENTION
from ssd.engine.attention.backend import DEFAULT as CPU_ATTENTION
from ssd.engine.attention.choice import check_attention
from ssd.engine.config import STATIC
from ssd.engine.precision import AUTO, SMALL_MODEL, Precision, choose_precision
from ssd.errors import SettingsError

OPENVINO = "openvino"
TORCH = "torch"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine and a dtype, each with the reason of its choice."""

    engine: str
    """``openvino``, ``static`` or ``torch``."""
    reason: str
    """One clause, for logs."""
    precision: Precision


def choose_engine(
    requested: str,
    dtype: str,
    device: str,
    attention: str,
    tensor_parallel_size: int = 1,
    *,
    num_weights: int,
) -> EngineChoice:
    """Return the engine and the dtype to run with.

    Args:
        requested: ``auto``, ``openvino``, ``static`` or ``torch``.
        dtype: ``auto``, ``bfloat16`` or ``float32``.
        device: ``cpu``, ``cuda:0``.
        attention: backend of the torch engine.
        tensor_parallel_size: number of ranks.
        num_weights: of the model.

    Raises:
        SettingsError: the engine cannot run with the other settings or is not installed; or the
            attention backend cannot run with the device or the dtype.
    """
    problem = _openvino_problem(dtype, attention)
    if tensor_parallel_size > 1:
        problem = f"it runs on one rank, and tensor_parallel_size is {tensor_parallel_size}"
    choice = _choose(requested, dtype, device, problem, is_small=num_weights < SMALL_MODEL)
    check_attention(attention, device, choice.precision.dtype)
    return choice


def _choose(
    requested: str, dtype: str, device: str, problem: str | None, *, is_small: bool
) -> EngineChoice:
    """Return the choice; ``problem`` excludes OpenVINO on a CPU."""
    if requested == STATIC:
        return EngineChoice(STATIC, "set explicitly", choose_precision(dtype, device))
    if not device.startswith("cpu"):
        if requested != AUTO:
            raise SettingsError(
                f"engine {requested} runs on CPUs, and the device is {device}; set engine to auto"
            )
        return EngineChoice(STATIC, "the engine of GPUs", choose_precision(dtype, device))
    if requested == OPENVINO:
        if problem is not None:
            raise SettingsError(f"engine openvino: {problem}; set engine to torch or auto")
        precision = (
            Precision("float32", "the OpenVINO engine computes in float32")
            if dtype == AUTO
            else choose_precision(dtype, device)
        )
        return EngineChoice(OPENVINO, "set explicitly", precision)
    precision = choose_precision(dtype, device)
    if requested == TORCH:
        return EngineChoice(TORCH, "set explicitly", precision)
    if problem is None and dtype == AUTO and precision.dtype != "float32" and is_small:
        precision = Precision("float32", f"the model has fewer than {SMALL_MODEL:,} weights")
    if problem is None and precision.dtype != "float32":
        problem = f"the OpenVINO engine computes in float32, and dtype auto is {precision.dtype}"
    if problem is not None:
        return EngineChoice(TORCH, problem, precision)
    return EngineChoice(OPENVINO, "the default on CPUs in float32", precision)


def _openvino_problem(dtype: str, attention: str) -> str | None:
    """Return why the settings or the installation exclude OpenVINO; None if they do not."""
    if dtype == "bfloat16":
        return "it computes in float32, and dtype is bfloat16"
    if attention not in (AUTO_ATTENTION, CPU_ATTENTION):
        return f"the attention backend {attention} belongs to torch"
    if find_spec("openvino") is None:
        return "the package openvino is not installed"
    return None
