"""Root-mean-square normalisation."""

from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, weight_D: Tensor, epsilon: float) -> None:
        self._weight_D = weight_D
        self._epsilon = epsilon

    def __call__(self, input_XD: Tensor) -> Tensor:
        """Return the normalised input, same shape and dtype."""
        return functional.rms_norm(
            input_XD, (self._weight_D.shape[0],), self._weight_D, self._epsilon
        )
