"""The dtype of weights and KV: as asked for, or what is fastest on this device.

``python -m ssd.engine.precision`` prints what ``auto`` means on this machine's CPU, as JSON, for
processes that do not load torch.
"""

import json
import sys
from dataclasses import asdict, dataclass

import torch

from ssd.engine.layers.linear import packing_problem

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Precision:
    """A dtype and why it was chosen."""

    dtype: str
    """``bfloat16`` or ``float32``."""
    reason: str
    """One clause for logs and status."""


def choose_precision(asked: str, device: str) -> Precision:
    """Return the dtype to run with.

    Args:
        asked: ``auto``, ``bfloat16`` or ``float32``.
        device: ``cpu``, ``cuda:0``. Only on a CPU does ``auto`` need a measurement: without packed
            weights bf16 is several times slower there than packed float32.
    """
    if asked != AUTO:
        return Precision(asked, "set explicitly")
    if not device.startswith("cpu"):
        return Precision("bfloat16", f"the default on {device}")
    problem = packing_problem(torch.bfloat16)
    if problem is None:
        return Precision("bfloat16", "the CPU packs bfloat16 weights")
    return Precision("float32", f"this CPU cannot pack bfloat16 weights: {problem}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(choose_precision(AUTO, "cpu"))) + "\n")
