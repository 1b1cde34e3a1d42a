"""The dtype of arithmetic and KV cache, and the format of the weights.

``python -m ssd.engine.precision`` prints the choice of ``auto`` on this machine's CPU as JSON, for
processes that do not import torch.

*Decision*: ``auto`` is float32 on a CPU without bfloat16 arithmetic, and without AMX for models
below ``TINY_MODEL`` weights. *Because*: without it, a CPU converts the weights in each product, and
passes of 7 and 56 rows took 220 and 1,089 ms instead of 130 and 325 (208M weights, AVX-512, torch).
With it, passes of few rows are faster. Embedded target, one core of an AMD EPYC with AVX512-BF16:
1, 7, 28 and 56 rows take 2.7, 3.4, 8.0 and 14 ms instead of 3.3, 4.6, 12 and 21. With AMX, 1, 7 and
56 rows take 1.8, 2.1 and 5.4 ms instead of 2.8, 4.0 and 15. On a Xeon with AVX512-BF16 and without
AMX, 56 rows take 27 ms instead of 20. The embedded draft is not faster in bfloat16 without AMX: its
target waits 1.6 instead of 1.1 ms for a table. *Not chosen*: timing both, since a busy machine
could then change the dtype, and with it the tokens, at each start. *Revisit when* memory matters
more.

*Decision*: with ``auto``, a target keeps its weights, and a draft of at least ``TINY_MODEL``
weights is int8 on a CPU with instructions for it. *Because*: the target chooses the text, and a
draft only guesses it. A quantised draft costs tokens: with the embedded draft of stage 5 in
float32, int8 and int4, a round has 4.14, 4.12 and 3.77 tokens at temperature 0, and 2.59, 2.60 and
2.51 at temperature 1 (24 texts of 256 tokens, K = 6). ``matrix`` has the times of the formats, and
the decision to keep bfloat16 weights in float32 arithmetic.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

Weights = Literal["same", "bfloat16", "int8", "int4"]
AUTO = "auto"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""The data types of torch, by their names in the settings."""
SMALL_MODEL = 32_000_000
"""Weights below which a target with float32 arithmetic is faster with float32 weights."""
MATRIX_ARITHMETIC = "amx_bf16"
BFLOAT16_ARITHMETIC = ("avx512_bf16", MATRIX_ARITHMETIC)
"""Names in ``torch.cpu.get_capabilities``. OpenVINO's attention in bfloat16 needs AVX-512."""
TINY_MODEL = 4_000_000
"""Weights below which neither int8 nor, without ``MATRIX_ARITHMETIC``, bfloat16 is faster: most of
a pass is not products."""
INT8_ARITHMETIC = ("avx512_vnni", "avx_vnni", "amx_int8")


@dataclass(frozen=True, slots=True)
class Precision:
    """A dtype and the reason of its choice."""

    dtype: str
    """``bfloat16`` or ``float32``."""
    reason: str
    """One clause, for logs and status."""


def choose_precision(requested: str, device: str, num_weights: int = TINY_MODEL) -> Precision:
    """Return the dtype to run with; a model without ``num_weights`` is not tiny."""
    if requested != AUTO:
        return Precision(requested, "set explicitly")
    if not device.startswith("cpu"):
        return Precision("bfloat16", f"the default on {device}")
    if not has_bfloat16():
        names = ", ".join(BFLOAT16_ARITHMETIC)
        return Precision("float32", f"this CPU has no bfloat16 arithmetic (none of {names})")
    if num_weights < TINY_MODEL and not has_matrices():
        reason = f"the model has fewer than {TINY_MODEL:,} weights, and this CPU no AMX"
        return Precision("float32", reason)
    return Precision("bfloat16", "this CPU has bfloat16 arithmetic")


def has_bfloat16() -> bool:
    """Return whether the CPU computes in bfloat16."""
    return _has_any(BFLOAT16_ARITHMETIC)


def has_matrices() -> bool:
    """Return whether the CPU has instructions for products of bfloat16 matrices."""
    return _has_any((MATRIX_ARITHMETIC,))


def keeps_bfloat16(num_weights: int) -> bool:
    """Return whether this CPU is fast with bfloat16 weights in float32 arithmetic.

    See ``matrix``, which has the times.
    """
    is_avx2 = _has_any(("avx2",)) and not _has_any(("avx512_f",))
    return is_avx2 and num_weights >= SMALL_MODEL


def choose_weights(requested: str, *, is_draft: bool, num_weights: int) -> Weights:
    """Return the format of the weights of a model on a CPU, with the engine openvino."""
    if requested == "int4":
        return "int4"
    is_faster = num_weights >= TINY_MODEL and _has_any(INT8_ARITHMETIC)
    is_default = requested == AUTO and is_draft and is_faster
    return "int8" if requested == "int8" or is_default else "same"


def _has_any(names: tuple[str, ...]) -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in names)


if __name__ == "__main__":
    choice = choose_precision(AUTO, "cpu")
    if choice.dtype != "float32" and not has_matrices():
        small = f"; models of fewer than {TINY_MODEL:,} weights are float32"
        choice = replace(choice, reason=choice.reason + small)
    sys.stdout.write(json.dumps(asdict(choice)) + "\n")
