"""Linear layers with weights that are packed once for the CPU's matrix kernels.

*Decision*: oneDNN's private packing operations, eager, one packed copy for every row count.
*Because*: reading weights takes most of the time; packed weights streamed 1.4 to 3.6 times faster
than plain ones (7 rows, one core, bf16 and fp32). *Not chosen*: ``torch.compile`` with freezing,
which keeps a copy per shape, needs a compiler at run time, and takes tens of seconds to start.
*Revisit when* torch has public operations for packing.

The operations are private and their bf16 path needs AVX-512 or AVX-NE-CONVERT. If they are
missing or raise, layers stay plain, which is slower, and a warning states the reason.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")
TYPICAL_ROWS = 8
PACKABLE = frozenset({torch.bfloat16, torch.float32})
_PROBE_SIZE = 64
_PROBE_TOLERANCE = 1e-2
"""Relative tolerance; the sums are exact in fp32, and bf16 keeps 8 bits of them."""


class Linear:
    """y = x W^T, without bias. Has one copy of its weight, packed if possible."""

    def __init__(self, weight_OI: Tensor, *, packed: bool = True) -> None:
        self._packed: Tensor | None = None
        self._plain_OI: Tensor | None = None
        if packed and weight_OI.device.type == "cpu" and weight_OI.dtype in PACKABLE:
            self._packed = _pack_or_warn(weight_OI)
        if self._packed is None:
            self._plain_OI = weight_OI

    @property
    def is_packed(self) -> bool:
        """Whether the weight is packed."""
        return self._packed is not None

    def __call__(self, input_RI: Tensor) -> Tensor:
        """Return [R, O] in the dtype of the input."""
        if self._packed is not None:
            return _multiply(input_RI, self._packed)
        assert self._plain_OI is not None
        return functional.linear(input_RI, self._plain_OI)


@cache
def packing_problem(dtype: torch.dtype) -> str | None:
    """Return the reason why CPU weights of a dtype cannot be packed; None if they can.

    Packs one small weight and compares its product with the plain one, once per process (25 ms).
    """
    size = _PROBE_SIZE
    # Integers below 2^7 are exact in bf16, so only the sums are rounded.
    weight_OI = (torch.arange(size * size) * 37 % 101 - 50).view(size, size).to(dtype)
    input_RI = (torch.arange(2 * size) * 53 % 89 - 44).view(2, size).to(dtype)
    try:
        output_RO = _multiply(input_RI, _pack(weight_OI)).double()
    except (RuntimeError, AttributeError) as error:
        return _first_line(error)
    plain_RO = input_RI.double() @ weight_OI.double().mT
    if not torch.allclose(output_RO, plain_RO, rtol=_PROBE_TOLERANCE, atol=1.0):
        return "products with packed weights are wrong"
    return None


def _pack_or_warn(weight_OI: Tensor) -> Tensor | None:
    """Return the packed weight; None if that fails, with one warning per process and reason."""
    problem = packing_problem(weight_OI.dtype)
    if problem is None:
        try:
            return _pack(weight_OI)
        except (RuntimeError, AttributeError) as error:
            problem = _first_line(error)
    _warn_plain(str(weight_OI.dtype).removeprefix("torch."), problem)
    return None


def _pack(weight_OI: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 - private; see the module docstring
        weight_OI.contiguous(), TYPICAL_ROWS
    )
    return packed


def _multiply(input_RI: Tensor, packed: Tensor) -> Tensor:
    output_RO: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - private; see the module docstring
        input_RI, packed, None, "none", [], ""
    )
    return output_RO


@cache
def _warn_plain(dtype: str, problem: str) -> None:
    _log.warning("plain_linears", dtype=dtype, reason=problem, consequence="slower forward passes")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
