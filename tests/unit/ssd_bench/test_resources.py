"""Whether memory, threads and descriptors of a process grow over a load."""

import os
from pathlib import Path

import pytest

from ssd_bench.resources import FLAT, MIB, ResourceLog, growth, read_resources, recorded


@pytest.mark.parametrize(
    ("resource", "samples", "is_flat"),
    [
        # It rises at the start only.
        ("memory_bytes", [100 * MIB, 500 * MIB, *[600 * MIB] * 14], True),
        ("memory_bytes", [(500 + 10 * second) * MIB for second in range(40)], False),
        ("threads", [20] * 60, True),
        ("threads", [20 + second // 8 for second in range(60)], False),
        ("descriptors", [20 + second % 5 for second in range(60)], True),
        ("descriptors", [20 + second for second in range(60)], False),
    ],
)
def test_what_grows_all_the_time_is_a_leak(
    resource: str, samples: list[int], *, is_flat: bool
) -> None:
    found = growth("target", resource, samples)
    assert found.is_flat is is_flat
    assert found.peak == max(samples)


def test_growth_is_named_in_mib() -> None:
    found = growth("draft 0", "memory_bytes", [100 * MIB] * 4 + [160 * MIB] * 4)
    assert str(found) == "memory, MiB, of draft 0 grew from 100 to 160"


def test_a_short_load_has_no_growth() -> None:
    log = ResourceLog({"own": os.getpid()})
    log.take()
    (sample,) = log.samples.values()
    log.samples = dict.fromkeys(range(100), sample)
    assert log.growth(20.0, 40.0) == []
    assert {each.resource for each in log.growth(20.0, 90.0)} == set(FLAT)


def test_descriptors_and_threads_of_a_process_are_counted_and_those_of_an_ended_one_are_0(
    tmp_path: Path,
) -> None:
    before = read_resources(os.getpid())
    with (tmp_path / "one").open("w"), (tmp_path / "two").open("w"):
        during = read_resources(os.getpid())
    assert during["descriptors"] == before["descriptors"] + 2
    assert before["threads"] >= 1
    assert before["memory_bytes"] > MIB
    assert read_resources(2**30) == dict.fromkeys(FLAT, 0)


async def test_processes_are_recorded_by_name() -> None:
    async with recorded({"own": os.getpid()}) as log:
        log.take()
    sample, *_ = log.samples.values()
    assert sample["own"]["memory_bytes"] > MIB
