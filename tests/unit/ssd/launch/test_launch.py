"""CPU split, and what a child's last words become."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import AddressError, SettingsError, SetupError
from ssd.launch import ChildProcess, one_cpu_a_core, plan_cpus, setup_error
from ssd.telemetry import Event


def cpus(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@given(allowed=st.sets(st.integers(0, 300), min_size=2, max_size=40), num_drafts=st.integers(0, 12))
def test_target_and_drafts_never_share_a_cpu_where_there_are_two(
    allowed: set[int], num_drafts: int
) -> None:
    plan = plan_cpus(tuple(allowed), num_drafts)
    ours = cpus(plan.target)
    theirs = {cpu for share in plan.drafts for cpu in cpus(share)}
    assert not plan.is_shared
    assert ours == sorted(allowed)[: (len(allowed) + 1) // 2]
    assert theirs.isdisjoint(ours)
    assert set(cpus(plan.others)) == allowed - set(ours)
    assert len(plan.drafts) == num_drafts
    if num_drafts:
        assert theirs | set(ours) <= allowed
        assert len(theirs) == min(len(allowed) - len(ours), max(num_drafts, len(theirs)))


def test_one_cpu_is_shared_and_said_so() -> None:
    plan = plan_cpus((3,), 2)
    assert plan.is_shared
    assert (plan.target, plan.drafts, plan.others) == ("3", ("3", "3"), "3")


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert one_cpu_a_core({0, 1, 2, 3}, tmp_path) == (0, 1)
    assert one_cpu_a_core({2, 3}, tmp_path) == (2, 3)


def test_without_a_topology_all_cpus_count(tmp_path: Path) -> None:
    assert one_cpu_a_core({5, 4}, tmp_path) == (4, 5)


@pytest.mark.parametrize(
    ("said", "kind"),
    [("SettingsError", SettingsError), ("AddressError", AddressError)]
    + [(word, SetupError) for word in ("FieldError", "Exception", "annotations", "")],
)
def test_a_childs_failure_keeps_its_kind(said: str, kind: type[SetupError]) -> None:
    error = setup_error("draft 0", Event("failed", {"error": said, "message": "port 1 in use"}))
    assert type(error) is kind
    assert str(error) == "draft 0: port 1 in use"


async def test_a_child_that_dies_unheard_is_told_with_its_last_lines() -> None:
    child = ChildProcess("draft 0", "ssd_no_such_module", (), lambda _name, _event: None)
    await child.start()
    with pytest.raises(SetupError, match=r"draft 0 ended with exit code 1: .*ssd_no_such_module"):
        await child.ready()
    assert await child.stop() == 1


async def test_stopping_what_never_started_is_no_error() -> None:
    child = ChildProcess("draft 0", "ssd_draft", (), lambda _name, _event: None)
    async with asyncio.timeout(1):
        assert await child.stop() == 0
