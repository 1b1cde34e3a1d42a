"""CPUs of target, drafts and other threads."""

import ctypes
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import SettingsError
from ssd.runtime.cpu_plan import (
    SHORT_SLICE_SECONDS,
    CpuPlan,
    divide,
    one_cpu_a_core,
    pin,
    plan_cpus,
    set_slice,
)

ALLOWED = frozenset(os.sched_getaffinity(0))


def cpus(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@given(allowed=st.sets(st.integers(0, 300), min_size=2, max_size=40), num_drafts=st.integers(1, 12))
def test_target_and_drafts_never_share_a_cpu_if_there_are_two(
    allowed: set[int], num_drafts: int
) -> None:
    plan = plan_cpus(tuple(allowed), num_drafts)
    target_cpus = cpus(plan.target)
    draft_cpus = {cpu for share in plan.drafts for cpu in cpus(share)}
    assert not plan.is_shared
    assert target_cpus == sorted(allowed)[: (len(allowed) + 1) // 2]
    assert draft_cpus.isdisjoint(target_cpus)
    assert len(plan.drafts) == num_drafts


@given(allowed=st.sets(st.integers(0, 300), min_size=2, max_size=40), num_drafts=st.integers(1, 12))
def test_one_cpu_runs_no_model_if_each_draft_has_its_own(
    allowed: set[int], num_drafts: int
) -> None:
    plan = plan_cpus(tuple(allowed), num_drafts)
    draft_cpus = {cpu for share in plan.drafts for cpu in cpus(share)}
    num_theirs = len(allowed) // 2
    has_spare = num_theirs > num_drafts
    assert len(draft_cpus) == (num_theirs - 1 if has_spare else min(num_theirs, num_drafts))
    assert cpus(plan.others) == ([max(allowed)] if has_spare else sorted(allowed))


def test_a_target_without_drafts_uses_all_cpus() -> None:
    assert plan_cpus((0, 1), 0) == CpuPlan("0,1", (), "0,1", is_shared=False)
    assert plan_cpus((0, 1, 2, 3), 0) == CpuPlan("0,1,2", (), "3", is_shared=False)
    assert plan_cpus((0, 1, 2, 3), 0, (4,)) == CpuPlan("0,1,2,3", (), "4", is_shared=False)


def test_cpus_without_models_run_all_other_threads() -> None:
    plan = plan_cpus((0, 1), 1, (2, 3))
    assert (plan.target, plan.drafts, plan.others) == ("0", ("1",), "2,3")
    assert plan_cpus((0,), 1, (2,)).others == "2"


def test_the_length_of_turns_is_that_of_a_thread_and_those_that_it_starts() -> None:
    def found(seconds: float | None = None) -> float:
        if seconds is not None:
            set_slice(seconds)
        return slice_seconds()

    def lengths() -> tuple[float, float, float, float]:
        usual, short = found(0.0), found(SHORT_SLICE_SECONDS)
        with ThreadPoolExecutor(1) as thread:
            return usual, short, thread.submit(found).result(), thread.submit(found, 0.0).result()

    with ThreadPoolExecutor(1) as thread:
        usual, short, inherited, usual_again = thread.submit(lengths).result()
    assert usual_again == usual
    assert inherited == short
    # Kernels before 6.12 have one length for all threads.
    assert short in {SHORT_SLICE_SECONDS, usual}


def slice_seconds() -> float:
    """Return the length of the turns of this thread."""
    attributes = ctypes.create_string_buffer(56)
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, attributes, 56, 0) == 0
    return float(int.from_bytes(attributes.raw[24:32], sys.byteorder)) / 1e9


def test_one_cpu_is_shared() -> None:
    plan = plan_cpus((3,), 2)
    assert plan.is_shared
    assert (plan.target, plan.drafts, plan.others) == ("3", ("3", "3"), "3")


@pytest.mark.parametrize(
    ("num_allowed", "plain", "speculative"), [(1, 1, 1), (2, 1, 2), (3, 2, 3), (8, 4, 7)]
)
def test_a_plan_counts_the_cpus_of_each_mode(
    num_allowed: int, plain: int, speculative: int
) -> None:
    plan = plan_cpus(range(num_allowed), 2)
    assert plan.num_cpus(with_drafts=False) == plain
    assert plan.num_cpus(with_drafts=True) == speculative


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert one_cpu_a_core({0, 1, 2, 3}, tmp_path) == (0, 1)
    assert one_cpu_a_core({2, 3}, tmp_path) == (2, 3)


def test_without_topology_files_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert one_cpu_a_core({5, 4}, tmp_path) == (4, 5)


def test_a_cpu_that_is_not_allowed_is_named_in_the_error() -> None:
    beyond = max(ALLOWED) + 1
    with pytest.raises(SettingsError, match=str(beyond)):
        pin(frozenset({beyond}), frozenset())
    with pytest.raises(SettingsError, match=str(beyond)):
        pin(frozenset(), frozenset({beyond}))
    assert os.sched_getaffinity(0) == ALLOWED


def test_the_step_thread_gets_all_cpus_by_default() -> None:
    one = frozenset({min(ALLOWED)})
    try:
        assert pin(frozenset(), one) == ALLOWED
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, ALLOWED)
    assert pin(one, frozenset()) == one


@given(allowed=st.sets(st.integers(0, 300), min_size=1, max_size=40), count=st.integers(1, 8))
def test_shares_are_disjoint_and_even_if_there_are_enough_cpus(
    allowed: set[int], count: int
) -> None:
    shares = divide(allowed, count)
    assert len(shares) == count
    assert set().union(*shares) <= allowed
    assert min(map(len, shares)) >= 1
    if len(allowed) >= count:
        assert sum(map(len, shares)) == len(set().union(*shares)) == len(allowed)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(len(share) == 1 for share in shares)
        assert set().union(*shares) == allowed
