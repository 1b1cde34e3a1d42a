"""The kernels that ``ssd plan`` assumes are the operations of the engine for GPUs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fake_gpu import MODEL, on_fake_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssd.engine.attention.paged import Attend
from ssd.engine.batch import BranchBatch, PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.pass_time import STATIC
from ssd.engine.target_runner import TargetRunner
from ssd.testing.fake_device import fake_device

ENGINE = EngineConfig(max_model_len=512, max_num_seqs=2, num_columns=7)
ONE_KERNEL = {"rms_norm"}
"""Operations that have a kernel of their own on a GPU, and several on other devices."""
NO_KERNEL = {"device", "empty", "empty_like", "_unsafe_view", "scalar_tensor"}
"""Operations that launch nothing; scalars are arguments of kernels."""


class Launches(TorchDispatchMode):
    """Counts the operations on the device that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        if name not in ONE_KERNEL | NO_KERNEL and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        is_on_device = any(
            isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs, result))
        )
        self.count += is_on_device and not func.is_view and name not in NO_KERNEL
        return result


def is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


class OneKernel:
    """Attention that counts as one operation, and with a trunk as flash-attn with its masses."""

    name = "one kernel"
    block_size = 256

    def __init__(self) -> None:
        self.launches = Launches()

    def prepare(
        self,
        block_tables_BJ: Tensor,
        lengths_B: Tensor,
        *,
        num_queries: int,
        num_pages: int,
        is_causal: bool,
    ) -> Attend:
        is_empty_B11 = None if is_causal else (lengths_B == 0)[:, None, None]

        def attend(
            queries_BQHE: Tensor, keys_YCGE: Tensor, values_YCGE: Tensor
        ) -> tuple[Tensor, Tensor]:
            self.launches.count += 1
            batch, queries, heads, _ = queries_BQHE.shape
            mass_BHQ = torch.empty((batch, heads, queries), device=queries_BQHE.device)
            if is_empty_B11 is not None:
                mass_BHQ = mass_BHQ.masked_fill(is_empty_B11, -torch.inf)
            return torch.empty_like(queries_BQHE), mass_BHQ

        return attend


def verify(runner: TargetRunner) -> Callable[[], object]:
    zero_B, tables_BJ = torch.zeros(2, dtype=torch.int64), torch.zeros((2, 3), dtype=torch.int64)
    tokens_BP = torch.zeros((2, 7), dtype=torch.int64)
    batch = PagedBatch(tokens_BP, zero_B, zero_B + 7, tables_BJ)
    return lambda: runner.execution.verify(batch)


def branches(runner: DraftRunner) -> Callable[[], object]:
    zero_B, tables_BJ = torch.zeros(2, dtype=torch.int64), torch.zeros((2, 3), dtype=torch.int64)
    tokens_BN = torch.zeros((2, 24), dtype=torch.int64)
    batch = BranchBatch(zero_B, tokens_BN, tokens_BN, 0, zero_B + 100, tables_BJ)
    return lambda: runner.execution.run_branches(batch)


def count(model: ModelConfig, *, is_tree: bool) -> int:
    """Return the number of kernels of a pass of the static engine."""
    attention = OneKernel()
    with fake_device() as device:
        if is_tree:
            engine = replace(ENGINE, branches=24, block_size=256)
            run = branches(
                on_fake_gpu(DraftRunner, engine, device, model=model, attention=attention)
            )
        else:
            engine = replace(ENGINE, block_size=256)
            run = verify(
                on_fake_gpu(TargetRunner, engine, device, model=model, attention=attention)
            )
        # The first pass of a shape makes its buffers.
        run()
        attention.launches.count = 0
        with attention.launches:
            run()
    return attention.launches.count


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_pass_has_the_kernels_of_the_plan(family: str, num_layers: int, *, is_tree: bool) -> None:
    model = replace(MODEL, family=family, num_layers=num_layers)
    assert count(model, is_tree=is_tree) == STATIC.of(model, is_tree=is_tree)
