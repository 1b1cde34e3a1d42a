"""Cancelled requests: one round frees everything that they hold."""

from typing import Any

import pytest
from tests.sequences import check_scheduler
from tests.unit.ssd_target.bench import Bench, plain

from ssd.testing.scripted_draft import Behaviour
from ssd.types import FinishReason, SamplingParams

NUM_STREAMS = 500
WAVE = 12
"""Streams that are open together: some run, some are storing their prompt, some wait."""


@pytest.mark.parametrize("num_rounds", [0, 1, 5])
def test_500_cancelled_streams_leave_nothing_after_one_round(num_rounds: int) -> None:
    bench = Bench()
    draft = bench.join([Behaviour.HIT, Behaviour.MISS, Behaviour.SILENT])
    cancelled: list[Any] = []
    while len(cancelled) < NUM_STREAMS:
        wave = [bench.submit([1, 2, 3 + index % 5] * 4, 40) for index in range(WAVE)]
        first = bench.num_submitted - WAVE + 1
        bench.run_rounds(num_rounds)
        for sequence_id in range(first, first + WAVE):
            bench.inbox.cancel(sequence_id)
        bench.run_rounds()
        assert bench.scheduler.is_idle
        assert bench.blocks.num_free == bench.all_free
        assert bench.pool.num_sessions == 0
        assert draft.num_sessions == 0
        cancelled += wave
    check_scheduler(bench.scheduler)
    assert {sink.finish_reason for sink in cancelled} == {FinishReason.CANCELLED}


def test_streams_beside_cancelled_ones_keep_their_tokens() -> None:
    bench = Bench()
    bench.join([Behaviour.HIT, Behaviour.MISS])
    kept = [bench.submit([1, 2, start], 40) for start in (3, 4)]
    for _ in range(20):
        bench.submit([5, 6, 7], 40)
        bench.run_rounds()
        bench.inbox.cancel(bench.num_submitted)
    bench.run()
    greedy = SamplingParams(temperature=0.0)
    for start, sink in zip((3, 4), kept, strict=True):
        assert sink.tokens == plain([1, 2, start], 40, greedy)
