"""Which rank is the cause of an end; where ranks run."""

import signal

import pytest

from ssd_target.rank import LOST
from ssd_target.rank_processes import failed_rank, rank_device, stuck_error


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ([None, -signal.SIGKILL, None], 2),
        ([LOST, LOST, 1], 3),
        ([LOST, None, LOST], 2),
        ([-signal.SIGABRT, None, -signal.SIGABRT], 2),
        ([-signal.SIGABRT, 78, None], 2),
        ([LOST, -signal.SIGABRT], 2),
        ([LOST, LOST, LOST], 0),
    ],
)
def test_the_rank_that_ended_for_a_reason_of_its_own_or_still_runs_is_the_cause(
    codes: list[int | None], rank: int
) -> None:
    assert failed_rank(codes) == rank


def test_ranks_whose_step_takes_too_long_are_named() -> None:
    assert str(stuck_error({2: 900.0})) == "rank 2 hangs: it did not end a step within 900 s"
    several = str(stuck_error({0: 15.0, 1: 16.0, 3: 15.0}))
    assert several.startswith("ranks 0, 1, 3 did not end a step within 15 s: one of them hangs")


def test_ranks_use_the_gpus_after_that_of_the_settings() -> None:
    assert [rank_device("cpu", rank) for rank in range(2)] == ["cpu", "cpu"]
    assert [rank_device("cuda", rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [rank_device("cuda:2", rank) for rank in range(2)] == ["cuda:2", "cuda:3"]
