"""What ranks compute together. The ranks are threads; collectives are those of processes."""

import socket
from typing import Any

import pytest
import torch
from tests.ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssd.engine.parallel import group as group_module
from ssd.engine.parallel.group import HOST, JOIN_SECONDS, START_SECONDS, RankGroup, join
from ssd.engine.parallel.shard import Shard
from ssd.errors import RankError

SIZES = (2, 4)
sizes = pytest.mark.parametrize("size", SIZES)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_same_sum_and_its_bits_do_not_depend_on_the_other_rows(
    size: int, dtype: torch.dtype
) -> None:
    parts = random(size, 7, 33).to(dtype)

    def run(group: RankGroup) -> tuple[Tensor, Tensor]:
        own_RD = parts[group.shard.rank]
        return group.add(own_RD), group.add(own_RD[3:4])

    found = on_ranks(size, run)
    for whole_RD, row_1D in found:
        assert whole_RD.dtype == dtype
        assert torch.equal(whole_RD, found[0][0])
        assert torch.equal(row_1D, whole_RD[3:4])
    torch.testing.assert_close(found[0][0], parts.double().sum(dim=0).to(dtype))


class Counted(TorchDispatchMode):
    """Counts the operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = str(func).split(".")[1]
        if name not in {"unbind", "view", "empty_like", "alias", "detach", "select"}:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@sizes
def test_a_sum_takes_as_many_kernels_as_there_are_ranks(size: int) -> None:
    class Gathered(RankGroup):
        def __init__(self) -> None:
            self.shard = Shard(0, size)

        def gather(self, part_X: Tensor) -> Tensor:
            return parts

    parts = random(size, 7, 33).bfloat16()
    with Counted() as counted:
        total_RD = Gathered().add(parts[0])
    assert len([name for name in counted.names if name != "select"]) == size
    expected_RD = parts[0].float()
    for part_RD in parts[1:]:
        expected_RD = expected_RD + part_RD
    assert torch.equal(total_RD, expected_RD.bfloat16())


@sizes
def test_the_smallest_number_of_all_ranks_counts(size: int) -> None:
    assert on_ranks(size, lambda group: group.smallest(9 - group.shard.rank)) == [10 - size] * size


def test_a_rank_that_hangs_ends_those_that_compute_and_those_that_wait() -> None:
    hanging: list[RankGroup] = []

    def run(group: RankGroup) -> str:
        group.set_deadline(0.2)
        if group.shard.rank == 3:
            hanging.append(group)
            return "hangs"
        take_part = group.receive_step if group.shard.rank == 1 else group.gather
        with pytest.raises(RankError, match=f"rank {group.shard.rank} has lost another rank"):
            take_part(torch.zeros(5))
        return "ended"

    assert on_ranks(4, run) == ["ended", "ended", "ended", "hangs"]


def test_a_rank_that_never_joins_is_found_before_the_deadline_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert JOIN_SECONDS < START_SECONDS
    monkeypatch.setattr(group_module, "JOIN_SECONDS", 0.2)
    listener = socket.create_server((HOST, 0))
    # With the deadline of the start, this would take longer than a test may.
    with pytest.raises(RankError):
        join(Shard(0, 2), listener.getsockname()[1], "cpu", listener.detach())


def test_ranks_that_have_joined_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "START_SECONDS", 77.0)
    assert on_ranks(2, lambda group: group.deadline_seconds) == [77.0, 77.0]
