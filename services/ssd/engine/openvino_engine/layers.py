"""The layers of a decoder as nodes of an OpenVINO graph.

Rows stay flat: [R, D]. ``matrix`` has the products with weights.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from openvino import Node, Output, opset15
from openvino.utils.node_factory import NodeFactory
from torch import Tensor

from ssd.engine.config import ModelConfig
from ssd.engine.models.rope import inverse_frequencies

_OPERATIONS = NodeFactory("opset4")


def port(x: Node) -> Output:
    """Return the one output of a node; an output of a node with several stays as it is."""
    return x if isinstance(x, Output) else x.output(0)


def ints(*values: int) -> Node:
    """Return a constant vector, int64."""
    return opset15.constant(np.array(values, dtype=np.int64))


def number(value: float) -> Node:
    """Return a constant float32 scalar."""
    return opset15.constant(np.float32(value))


def reshape(x: Node, *shape: int) -> Node:
    """Return ``x`` in another shape; 0 keeps the size of an axis, -1 is what is left."""
    return opset15.reshape(x, ints(*shape), special_zero=True)


def product(x: Node, y: Node) -> Node:
    """Return x y."""
    return opset15.matmul(x, y, transpose_a=False, transpose_b=False)


def product_with_transposed(x: Node, y: Node) -> Node:
    """Return x y^T."""
    return opset15.matmul(x, y, transpose_a=False, transpose_b=True)


def rms_norm(x: Node, weight_D: Tensor, epsilon: float) -> Node:
    """Return x / rms(x) * weight over the last axis, in the form that the plugin fuses."""
    square = opset15.power(x, number(2))
    mean = opset15.reduce_mean(square, ints(-1), keep_dims=True)
    scale = opset15.divide(number(1), opset15.sqrt(opset15.add(mean, number(epsilon))))
    return opset15.multiply(opset15.multiply(x, scale), opset15.constant(weight_D.float().numpy()))


def swish(x: Node) -> Node:
    """Return x * sigmoid(x), as a node of one input: ``opset15`` makes one of two."""
    node: Node = _OPERATIONS.create("Swish", [port(x)], {})
    return node


def rows_of(x: Node, index: Node) -> Node:
    """Return the rows of ``x`` with these numbers."""
    return opset15.gather(x, index, opset15.constant(np.int32(0)))


def finite_or_zero(x: Node) -> Node:
    """Return ``x`` with 0 in place of NaN and infinity; see ``KVStorage``."""
    return opset15.select(opset15.is_finite(x), x, number(0))


class Rotation:
    """The rotary embedding of the positions of a pass."""

    def __init__(self, config: ModelConfig, max_len: int, positions_R: Node) -> None:
        angle_SE = torch.outer(torch.arange(max_len).float(), inverse_frequencies(config))
        half = config.head_size // 2
        # Both halves of a head are an axis of their own, so one gather exchanges them.
        self._half = half
        cos_SE = torch.cat((angle_SE.cos(), angle_SE.cos()), dim=1)
        sin_SE = torch.cat((-angle_SE.sin(), angle_SE.sin()), dim=1)
        self._cos = self._table(cos_SE.numpy(), positions_R)
        self._signed_sin = self._table(sin_SE.numpy(), positions_R)

    def rotate(self, heads: Node, num_heads: int) -> Node:
        """Rotate the halves of each head against each other; [R, H*E] in and out."""
        halves = reshape(heads, -1, num_heads, 2, self._half)
        swapped = opset15.gather(halves, ints(1, 0), ints(2))
        rotated = opset15.add(
            opset15.multiply(halves, self._cos), opset15.multiply(swapped, self._signed_sin)
        )
        return reshape(rotated, -1, num_heads * 2 * self._half)

    def _table(self, table_SE: NDArray[np.float32], positions_R: Node) -> Node:
        return reshape(rows_of(opset15.constant(table_SE), positions_R), -1, 1, 2, self._half)
