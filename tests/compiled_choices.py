"""Choices that are compiled as on CUDA, but to the operations of torch, for tests on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from ssd.engine.sampling import keyed


class CountingCompiler:
    """A backend of ``torch.compile`` that runs a graph as it is."""

    num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        """Count a compilation."""
        self.num_graphs += 1
        return graph.forward


@contextmanager
def compiled_choices(*modules: ModuleType) -> Iterator[CountingCompiler]:
    """Compile what the modules pass to ``compiled_on``."""
    compiler = CountingCompiler()

    def compiled_on(_device: str, function: Any) -> Any:
        return torch.compile(function, dynamic=True, backend=compiler)

    # Compilations of other tests would count towards the limit of a function.
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        # One round of the noise has the shapes of all rounds, and is traced in less time.
        patch.setattr(keyed, "_NUM_ROUNDS", 1)
        for module in modules:
            patch.setattr(module, "compiled_on", compiled_on)
        yield compiler
    torch.compiler.reset()
