"""A device without hardware, which shows where a program waits for a device or mixes devices.

Tensors on it have a shape, a type and the device, and no values. Any machine has it, since it is a
backend of torch that consists of a name. Tensors on the CPU are real. Under ``fake_device``

- an operation on tensors of different devices raises, also ``index_put`` with a number of the host,
  which CUDA copies and waits for,
- an operation that needs a value on the host raises: ``item``, ``tolist``, ``bool``, ``nonzero``, a
  mask as an index, a shape that depends on data,
- copies from the device to the host give zeros and are counted: each is a synchronisation.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_NAME = "fakegpu"
_COPIES = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})  # noqa: SLF001 - has no public name

_INDEX_PUTS = frozenset({torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default})


class FakeDevice(TorchDispatchMode):
    """The device, while ``fake_device`` is active."""

    name = f"{_NAME}:0"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_reads = 0
        """Copies from the device to the host."""
        self._fake = FakeTensorMode()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation: without values if it concerns the device, else as usual."""
        kwargs = kwargs or {}
        if not any(_is_ours(leaf) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], FakeTensor):
            self.num_reads += 1
            return args[0].zero_()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        if func not in _INDEX_PUTS:
            # Other operations take numbers as tensors without dimensions.
            on_host = [tensor for tensor in on_host if tensor.dim() > 0]
        if func not in _COPIES and on_host:
            raise RuntimeError(f"{func} mixes tensors of the host and of {self.name}")
        args, kwargs = tree_map_only(Tensor, self._without_values, (args, kwargs))
        with self._fake:
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.device.type == "cpu":
            self.num_reads += 1
            return torch.zeros(result.shape, dtype=result.dtype)
        return result

    def _without_values(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Run operations on a device without hardware; see the module."""
    _register()
    with FakeDevice() as device:
        yield device


def _is_ours(value: object) -> bool:
    return isinstance(value, FakeTensor) or (
        isinstance(value, torch.device) and value.type == _NAME
    )


@cache
def _register() -> None:
    _setup_privateuseone_for_python_backend(_NAME)
