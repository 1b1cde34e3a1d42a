"""Graphs without a GPU: they fix what Python computes and where results are, as CUDA graphs do.

Unlike a CUDA graph, a recording also runs its operations.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssd.engine.capture import Graph

_READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero")


class RecordedGraph(TorchDispatchMode):
    """The operations between ``begin`` and ``end``. A replay leaves each result in its place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Run compiled functions too: the compiler refuses all other modes."""
        return True

    def begin(self) -> None:
        """See ``Graph``."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """See ``Graph``."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        """See ``Graph``."""
        for operation, args, kwargs, result in self._operations:
            again = operation(*args, **kwargs)
            for place, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(new, torch.ScriptObject):
                    Work.unbox(new).wait()
                elif isinstance(new, Tensor) and new is not place:
                    place.copy_(new)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run an operation and record it.

        Raises:
            RuntimeError: it reads a tensor on the host.
        """
        if func.name().startswith(_READS):
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        changes_memory = func.namespace == "c10d" or func._schema.is_mutable  # noqa: SLF001
        if changes_memory or not _is_view(args, result):
            self._operations.append((func, args, kwargs, result))
        return result


def _is_view(args: Any, result: Any) -> bool:
    """Whether all results are in the memory of an argument, where a replay finds them."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
    places = {tensor.untyped_storage().data_ptr() for tensor in _tensors(result)}
    return bool(places) and places <= memory


def _tensors(tree: Any) -> list[Tensor]:
    """Return all tensors but packed weights, whose memory has no address."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_mkldnn]


class RecordedGraphs:
    """See ``Graphs``."""

    warm_up_runs = 1

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """See ``Graphs``."""
        yield

    def free_bytes(self) -> int:
        """See ``Graphs``."""
        return 0

    def make(self) -> Graph:
        """See ``Graphs``."""
        return RecordedGraph()

    def give_up(self, graph: Graph) -> None:
        """See ``Graphs``."""
