"""Choices of the controller in the decode loop: they change the work of drafts, never a token."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.ssd_target.bench import Bench, plain

from ssd.engine.batch import PagedBatch
from ssd.speculation.controller import Choice, ControllerReport, Reason
from ssd.testing.clock import FakeClock
from ssd.testing.scripted_controller import ScriptedController
from ssd.testing.scripted_draft import Behaviour
from ssd.types import CloseSession, Mode, SamplingParams
from ssd_target.decoding.calibration import calibrate

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.9, seed=7)
OFF = Choice(is_on=False, max_proposed=0)
ON = Choice(is_on=True, max_proposed=3)
PROMPTS = [[1, 2, 3], [4, 4], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2]]


choices = st.lists(
    st.one_of(
        st.just(OFF), st.builds(Choice, is_on=st.just(value=True), max_proposed=st.integers(0, 3))
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=30, deadline=None)
@given(
    choices=choices,
    script=st.lists(
        st.sampled_from(
            [Behaviour.HIT, Behaviour.MISS, Behaviour.HALF, Behaviour.WRONG, Behaviour.SILENT]
        ),
        min_size=1,
        max_size=12,
    ),
    sampling=st.sampled_from([GREEDY, WARM]),
    modes=st.lists(
        st.sampled_from([Mode.AUTO, Mode.SPECULATIVE, Mode.AUTOREGRESSIVE]), min_size=3, max_size=3
    ),
)
def test_random_choices_never_change_a_token(
    choices: list[Choice], script: list[Behaviour], sampling: SamplingParams, modes: list[Mode]
) -> None:
    bench = Bench(controller=ScriptedController(*choices), circuit_breaker=False, backup="ngram")
    draft = bench.join(script, sampling=sampling)
    sinks = [
        bench.submit(prompt, 20, sampling=sampling, mode=mode)
        for prompt, mode in zip(PROMPTS, modes, strict=True)
    ]
    bench.run()
    for prompt, sink in zip(PROMPTS, sinks, strict=True):
        assert sink.tokens == plain(prompt, 20, sampling)
    assert draft.num_sessions == 0


def test_off_closes_the_sessions_and_drafts_receive_nothing_more() -> None:
    bench = Bench(controller=ScriptedController(ON, ON, ON, OFF))
    draft = bench.join([Behaviour.HIT])
    sink = bench.submit([1, 2, 3], 30)
    bench.run_rounds(3)
    assert draft.num_sessions == 1
    bench.run_rounds()
    assert draft.num_sessions == 0
    num_commits = len(draft.commits)
    bench.run()
    assert len(draft.commits) == num_commits
    assert isinstance(draft.received[-1], CloseSession)
    assert sink.tokens == plain([1, 2, 3], 30, GREEDY)
    assert bench.runner.kept_rows[:5] == [True] * 3 + [False] * 2
    plain_rounds = bench.controller.rounds[3:]
    assert all(sample.is_plain and sample.columns == 1 for sample in plain_rounds)
    assert sink.statistics.paused_rounds == len(plain_rounds)


def test_on_opens_sessions_again() -> None:
    bench = Bench(controller=ScriptedController(OFF, OFF, OFF, ON))
    draft = bench.join([Behaviour.HIT])
    sink = bench.submit([1, 2, 3], 30)
    bench.run()
    assert sink.statistics.paused_rounds == 3
    assert sink.statistics.hits > 3
    assert len(draft.openings) == 1


def test_while_the_controller_is_off_only_requests_that_force_speculation_are_eligible() -> None:
    bench = Bench(controller=ScriptedController(OFF))
    modes = (Mode.SPECULATIVE, Mode.AUTO, Mode.AUTOREGRESSIVE)
    for number, mode in enumerate(modes):
        bench.submit([1, number], 9, mode=mode)
    bench.run_rounds(2)
    counts = bench.log.counts
    assert (counts.running, counts.eligible) == (3, 1)


def test_a_request_that_forces_speculation_keeps_its_session() -> None:
    bench = Bench(controller=ScriptedController(OFF))
    draft = bench.join([Behaviour.HIT])
    forced = bench.submit([1, 2, 3], 20, mode=Mode.SPECULATIVE)
    auto = bench.submit([4, 4], 20)
    bench.run()
    assert forced.statistics.hits > 3
    assert forced.statistics.paused_rounds == 0
    assert auto.statistics.proposed_tokens == 0
    assert len(draft.openings) == 1
    assert {sample.num_auto for sample in bench.controller.rounds} <= {0, 1}


def test_proposals_have_at_most_the_chosen_length() -> None:
    bench = Bench(controller=ScriptedController(Choice(is_on=True, max_proposed=2)))
    bench.join([Behaviour.HIT])
    sink = bench.submit([1, 2, 3], 19)
    bench.run()
    assert sink.statistics.hits > 3
    assert max(sample.num_proposed for sample in bench.controller.rounds) == 2


def test_a_sample_describes_its_round() -> None:
    bench = Bench(controller=ScriptedController(ON))
    bench.join([Behaviour.HIT])
    bench.submit([1, 2, 3], 20)
    bench.run()
    # The first round stored the prompt and had no proposal.
    sample = bench.controller.rounds[1]
    assert (sample.num_sequences, sample.num_auto, sample.num_sessions) == (1, 1, 1)
    assert (sample.num_answered, sample.columns) == (1, 4)
    assert (sample.num_proposed, sample.num_accepted, sample.num_tokens) == (3, [1, 1, 1], 4)
    assert 0.0 < sample.verify_seconds < sample.seconds


def test_a_sample_contains_the_chunk_of_a_prompt_that_was_stored_before_its_round() -> None:
    bench = Bench(controller=ScriptedController(OFF))
    bench.submit([1, 2, 3], 20)
    bench.run()
    samples = bench.controller.rounds
    assert [each.prompt_tokens for each in samples[:2]] == [2, 0]
    assert samples[0].prefill_seconds >= 0.0


def test_the_report_is_kept_for_the_status() -> None:
    bench = Bench(controller=ScriptedController(OFF, speed_up=0.5))
    bench.submit([1, 2, 3], 4)
    bench.run()
    assert bench.log.speculation == ControllerReport(
        is_on=False, reason=Reason.MEASURING, speed_up=0.5, max_proposed=0
    )


def timed_runner(clock: FakeClock, seconds: Callable[[int, int], float]) -> Any:
    """A runner of up to 6 sequences whose verifies take a time by columns and sequences."""

    def verify(batch: PagedBatch) -> torch.Tensor:
        num_sequences, columns = batch.tokens_BP.shape
        clock.advance(seconds(columns, num_sequences))
        return torch.zeros(1)

    engine = SimpleNamespace(max_num_seqs=6, block_size=4)
    return SimpleNamespace(engine=engine, prepare=lambda batch: batch, verify=verify)


def test_the_calibration_times_three_columns_of_all_sizes_and_all_columns_of_one_sequence() -> None:
    clock = FakeClock()
    runner = timed_runner(clock, lambda columns, size: 1e-3 * columns * size)
    calibration = calibrate(runner, (1, 2, 3, 4), clock)
    shapes = [(count, size) for size in (1, 2, 4, 6) for count in (1, 3, 4)] + [(2, 1)]
    assert calibration.seconds == pytest.approx(
        {(count, size): 1e-3 * count * size for count, size in shapes}
    )


def test_a_slow_target_calibrates_fewer_sizes_and_columns() -> None:
    clock = FakeClock()
    runner = timed_runner(clock, lambda _columns, _size: 0.1)
    calibration = calibrate(runner, (1, 2, 3, 4, 5, 6, 7), clock)
    assert set(calibration.seconds) == {(1, 1), (4, 1), (7, 1), (6, 1), (5, 1)}


def test_a_burst_of_other_work_excludes_no_length() -> None:
    clock = FakeClock()
    runner = timed_runner(clock, lambda columns, _size: 1e-3 * (20 if columns == 6 else columns))
    calibration = calibrate(runner, (1, 2, 3, 4, 5, 6, 7), clock)
    assert calibration.seconds[6, 1] == calibration.seconds[7, 1] == pytest.approx(7e-3)


def test_a_target_that_ends_no_size_in_time_has_no_calibration() -> None:
    clock = FakeClock()
    runner = timed_runner(clock, lambda _columns, _size: 0.2)
    assert calibrate(runner, (1, 2, 3), clock).seconds == {}
