"""Linear layers whose weights are packed once for the CPU's matrix kernels.

*Decision*: oneDNN's private packing operations, eager, one packed copy for every row count.
*Because*: reading weights dominates; packed weights streamed 1.4 to 3.6 times faster than plain
ones (7 rows, one core, bf16 and fp32). *Not chosen*: ``torch.compile`` with freezing, which keeps
a copy per shape, needs a compiler at run time, and starts in tens of seconds. *Revisit when* torch
offers packing in public.
"""

import torch
from torch import Tensor
from torch.nn import functional


def can_pack(weight_OI: Tensor) -> bool:
    """Tell whether this build of torch packs weights of this kind."""
    return (
        weight_OI.device.type == "cpu"
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and weight_OI.dtype in (torch.bfloat16, torch.float32)
    )


class Linear:
    """y = x W^T, without bias. Holds one copy of its weight, packed where that is possible."""

    def __init__(self, weight_OI: Tensor, *, packed: bool = True, typical_rows: int = 8) -> None:
        self._is_packed = packed and can_pack(weight_OI)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 private, see above
                weight_OI.contiguous(), typical_rows
            )
            if self._is_packed
            else weight_OI
        )

    def __call__(self, input_RI: Tensor) -> Tensor:
        """Return [R, O] in the dtype of the input."""
        if self._is_packed:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 private, see above
                input_RI, self._weight, None, "none", [], ""
            )
            return output
        return functional.linear(input_RI, self._weight)
