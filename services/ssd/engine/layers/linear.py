"""Linear layers."""

from torch import Tensor
from torch.nn import functional


class Linear:
    """y = x W^T, without bias."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def __call__(self, input_RI: Tensor) -> Tensor:
        """Return [R, O] in the dtype of the input."""
        return functional.linear(input_RI, self._weight_OI)
