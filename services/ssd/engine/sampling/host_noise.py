"""The logarithms of the shared noise by torch, which has vector instructions for them on every CPU.

numpy has them with AVX-512 only. Both have the same bits: see ``speculation.noise``.
"""

import numpy as np
import torch
from numpy.typing import NDArray

_LARGEST_V = 1 - 2**-24


def gumbel_by_torch(noise: NDArray[np.float32]) -> None:
    """Convert words, given as contiguous float32, to Gumbel noise in place."""
    negative_v = torch.from_numpy(noise).add_(0.5).mul_(-(2.0**-32)).clamp_(min=-_LARGEST_V)
    negative_v.copy_(negative_v.double().add_(1.0).log_().neg_().log_().neg_())
