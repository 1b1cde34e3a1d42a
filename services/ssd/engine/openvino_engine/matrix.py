"""The matrices of a graph in their stored format: float32, bfloat16, int8 or int4.

Int8 has one scale for each row, int4 one for each ``GROUP`` inputs of a row; a matrix whose inputs
``GROUP`` does not divide is int8. Embedding and head are int8 in both: a token reads one row of the
embedding, and the head chooses. Products convert the weights where they read them. On CPUs with
VNNI they also round their inputs to int8, with one scale for each ``GROUP_OF_INPUTS`` values of a
row, so a row does not depend on other rows.

*Measured* (one core, 208M weights, context 256), ms for 1, 7, 24 and 56 rows. Xeon at 2.3 GHz with
AVX512-BF16 and VNNI: float32 57, 84, 121, 221; bfloat16 38, 62, 146, 320; int8 19, 25, 51, 109;
int4 14, 19, 45, 102. Xeon at 2 GHz with AMX, in part used by other machines: float32 80, 110, 177,
348; bfloat16 70, 72, 107, 189; int8 34, 41, 91, 213; int4 21, 30, 87, 203. On both, rows have the
same bits in passes of 1 to 56 rows. On AMD EPYC with AVX2, quantised weights have the same bits in
passes of 2 to 80 rows; one row and more rows have other kernels.

*Decision*: packed products with the weights as the right factor. *Because*: rows have the same bits
in passes of every number of rows that was measured. *Not chosen*: weights as the left factor or not
packed (43 instead of 70 ms for one row in bfloat16 on the core with AMX, and one copy in memory):
each has a kernel of its own for few rows, with other bits.

*Decision*: a target with float32 arithmetic keeps bfloat16 weights on a CPU with AVX2 and without
AVX-512, from ``SMALL_MODEL`` weights on. *Because*: passes of up to four rows read half of the
memory. With weights in float32 and bfloat16, passes of 1, 4, 7, 16, 32 and 64 rows take 55, 69, 91,
129, 233 and 402 ms and 35, 44, 87, 132, 254 and 449 ms (208M weights, one core of an AMD EPYC, in
turn in one process, other work on the machine), and an earlier run had 189 and 227 ms for 28 rows.
A process has .83 instead of 2.02 GB beside its files. Rows have the same bits in passes of up to 80
rows, so larger passes are divided. *Not chosen*: float32 weights in passes of many rows, since the
bits of a row would depend on the pass; bfloat16 weights with AVX-512, where one to four rows have a
kernel with other bits; bfloat16 weights in the embedded target: at T = 0, proposals of six tokens
lose a tenth, although plain decoding and shorter proposals gain a third. *Revisit when* a plugin
has one kernel for all numbers of rows.
"""

import mmap

import numpy as np
import openvino
import torch
from openvino import Node, Type, opset15
from torch import Tensor

from ssd.engine.openvino_engine.layers import product_with_transposed, reshape, rows_of
from ssd.engine.precision import Weights

GROUP = 64
"""Inputs of a row that share a scale in int4."""
GROUP_OF_INPUTS = 32
_INT4_PER_BYTE = 2


class Matrix:
    """A weight [O, I] as nodes of a graph."""

    def __init__(self, weight_OI: Tensor, stored: Weights) -> None:
        """Construct; ``weight_OI`` is float32 or bfloat16.

        In these formats, the graph reads its memory as long as the matrix exists.
        """
        self._scales: Node | None = None
        self._size = weight_OI.shape[1]
        if stored in ("same", "bfloat16"):
            self._values = openvino.op.Constant(over(weight_OI), shared_memory=True)
            # OpenVINO does not keep the memory of a bfloat16 tensor alive.
            self._weight_OI = weight_OI
            return
        is_grouped = stored == "int4" and self._size % GROUP == 0
        largest = 7 if is_grouped else 127
        grouped_OXI = weight_OI.float().view(
            len(weight_OI), -1, GROUP if is_grouped else self._size
        )
        scales_OX1 = grouped_OXI.abs().amax(dim=2, keepdim=True).clamp_min_(1e-12) / largest
        values_OXI = (grouped_OXI / scales_OX1).round_().to(torch.int8)
        if is_grouped:
            self._values = _int4_constant(values_OXI)
            self._scales = opset15.constant(scales_OX1.numpy())
        else:
            self._values = opset15.constant(values_OXI[:, 0].numpy())
            self._scales = opset15.constant(scales_OX1[:, 0].numpy())

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        size: int = self._values.get_byte_size()
        return size

    def times(self, x: Node) -> Node:
        """Return x W^T of rows ``x``."""
        values = _as_float(self._values)
        if self._scales is not None:
            # The pattern that the plugin compiles to a product with stored integers.
            values = reshape(opset15.multiply(values, self._scales), -1, self._size)
        return product_with_transposed(x, values)

    def rows(self, index: Node) -> Node:
        """Return the rows of W with these numbers, float32. Not for int4."""
        rows = _as_float(rows_of(self._values, index))
        if self._scales is None:
            return rows
        return opset15.multiply(rows, rows_of(self._scales, index))


class CopiedMatrix(Matrix):
    """A 16-bit weight that the plugin copies into the format of its kernel when it compiles."""

    def __init__(self, weight_OI: Tensor) -> None:
        """Construct.

        The kernel reads float16, where values below 2**-17 are rounded to multiples of 2**-24. In a
        row whose largest weight is above 2**-14, the inputs are rounded by more.
        """
        self._scales = None
        self._size = weight_OI.shape[1]
        num_bytes = weight_OI.numel() * torch.float16.itemsize
        # Python's default, shared memory, would not be freed.
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        values_OI = torch.frombuffer(self._memory, dtype=torch.float16).view(weight_OI.shape)
        values_OI.copy_(weight_OI)
        self._values = opset15.constant(values_OI.numpy(), shared_memory=True)

    def release(self) -> None:
        """Free the memory of the values; the compiled graphs read their copies."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def fits_float16(weight: Tensor) -> bool:
    """Return whether all values of a weight are finite in float16."""
    limits: list[float] = torch.stack(weight.aminmax()).tolist()
    return max(map(abs, limits)) <= torch.finfo(torch.float16).max


def outer(stored: Weights) -> Weights:
    """Return the format of embedding and head of a model whose layers have this one."""
    return "int8" if stored == "int4" else stored


def over(tensor: Tensor) -> openvino.Tensor:
    """Return a tensor over the memory of a float32 or bfloat16 one, which must live as long."""
    if tensor.dtype is torch.float32:
        return openvino.Tensor(tensor.numpy(), shared_memory=True)
    words = tensor.view(torch.uint16).numpy()
    return openvino.Tensor(words, openvino.Shape(words.shape), Type.bf16)


def _int4_constant(values_OXI: Tensor) -> Node:
    nibbles = values_OXI.flatten().numpy().view(np.uint8) & 0xF
    packed = nibbles[::_INT4_PER_BYTE] | nibbles[1::_INT4_PER_BYTE] << 4
    tensor = openvino.Tensor(packed, openvino.Shape(values_OXI.shape), Type.i4)
    return openvino.op.Constant(tensor, shared_memory=False)


def _as_float(values: Node) -> Node:
    if values.get_element_type() == Type.f32:
        return values
    converted = opset15.convert(values, "f32")
    if values.get_element_type() in (Type.bf16, Type.f16):
        # Without this mark, the plugin also keeps the matrix in float32. It would stop the plugin
        # from using integers.
        converted.get_rt_info()["decompression_0"] = True
    return converted
