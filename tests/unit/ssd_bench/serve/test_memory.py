"""Whether memory grows over a load."""

import os

from ssd.testing.clock import FakeClock
from ssd_bench.serve.memory import MIB, MemoryLog, memory_figures, recorded_memory


def test_memory_that_rises_at_the_start_only_is_flat() -> None:
    found = memory_figures([100 * MIB, 500 * MIB, *[600 * MIB] * 14])
    assert found.growth_bytes == 0
    assert found.peak_bytes == 600 * MIB


def test_memory_that_grows_all_the_time_is_not_flat() -> None:
    found = memory_figures([(500 + 10 * second) * MIB for second in range(40)])
    assert found.growth_bytes > found.allowed_growth_bytes


def test_buffers_of_the_first_of_two_loads_are_no_growth_over_both() -> None:
    first = MemoryLog(num_bytes={"draft 0": [*[100 * MIB] * 40, *[140 * MIB] * 20]})
    both = MemoryLog()
    both.extend(first)
    both.extend(MemoryLog(num_bytes={"draft 0": [140 * MIB] * 60}))
    assert first.figures()["draft 0"].growth_bytes == 40 * MIB
    assert both.figures()["draft 0"].growth_bytes == 0


def test_a_short_load_has_no_figures() -> None:
    assert MemoryLog(num_bytes={"target": [1, 2, 3]}).figures() == {}


async def test_the_memory_of_a_process_is_recorded_and_that_of_an_ended_one_is_0() -> None:
    async with recorded_memory({"self": os.getpid(), "ended": 2**30}, FakeClock()) as log:
        pass
    assert log.num_bytes["self"][0] > MIB
    assert log.num_bytes["ended"] == [0]
