"""A capture without a GPU: it fixes what Python computes, as a CUDA graph does."""

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ssd.engine.capture import Pass


def trace(function: Pass) -> Pass:
    """Record the operations of a function, and return a function that repeats them.

    See ``Capture``. Tensors of the function are used in place. Numbers, shapes and branches of
    Python keep the values that they have now.
    """
    recorded = make_fx(function)()

    def replay() -> Tensor:
        result: Tensor = recorded()
        return result

    return replay
