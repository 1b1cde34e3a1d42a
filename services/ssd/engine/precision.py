"""The dtype of weights and KV cache: that of the settings, or the fastest of the device.

``python -m ssd.engine.precision`` prints the choice of ``auto`` on this machine's CPU as JSON, for
processes that do not import torch.

*Decision*: ``auto`` is float32 on a CPU that packs bf16 weights but has no bf16 arithmetic.
*Because*: such a CPU converts the weights in each product. Passes of 7 or 56 rows (pair widened 4x)
took 220 and 1,089 ms in bf16, 130 and 325 ms in float32 (fastest of 40 / 12, CPU time of one
thread, AVX-512 without AVX512-BF16, busy machine). *Not chosen*: timing both, since a busy machine
could then change the dtype, and with it the tokens, at each start. *Revisit when* memory matters
more.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace

import torch

from ssd.engine.layers.linear import packing_problem

AUTO = "auto"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""The data types of torch, by their names in the settings."""
SMALL_MODEL = 32_000_000
"""Weights below which a model is faster in float32, with OpenVINO, on every CPU; see
``engine_choice``."""
BFLOAT16_ARITHMETIC = ("avx512_bf16", "amx_bf16", "avx_ne_convert")
"""Names in ``torch.cpu.get_capabilities``. The last one has not been measured alone."""


@dataclass(frozen=True, slots=True)
class Precision:
    """A dtype and the reason of its choice."""

    dtype: str
    """``bfloat16`` or ``float32``."""
    reason: str
    """One clause, for logs and status."""


def choose_precision(requested: str, device: str) -> Precision:
    """Return the dtype to run with.

    Args:
        requested: ``auto``, ``bfloat16`` or ``float32``.
        device: ``cpu``, ``cuda:0``. On a CPU, ``auto`` needs packed weights and bf16 arithmetic for
            bf16: without them, it is several times slower than packed float32.
    """
    if requested != AUTO:
        return Precision(requested, "set explicitly")
    if not device.startswith("cpu"):
        return Precision("bfloat16", f"the default on {device}")
    problem = packing_problem(torch.bfloat16)
    if problem is not None:
        return Precision("float32", f"this CPU cannot pack bfloat16 weights: {problem}")
    has = torch.cpu.get_capabilities()
    if not any(has.get(name, False) for name in BFLOAT16_ARITHMETIC):
        names = ", ".join(BFLOAT16_ARITHMETIC)
        return Precision("float32", f"this CPU has no bfloat16 arithmetic (none of {names})")
    return Precision("bfloat16", "the CPU has packed weights and arithmetic for bfloat16")


if __name__ == "__main__":
    found = choose_precision(AUTO, "cpu")
    if found.dtype != "float32":
        small = f"; models of fewer than {SMALL_MODEL:,} weights are float32"
        found = replace(found, reason=found.reason + small)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
