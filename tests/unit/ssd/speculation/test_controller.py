"""The controller in simulated worlds: it never loses against plain decoding, and it settles."""

import math
from dataclasses import replace
from statistics import fmean, median

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.unit.ssd.speculation.controller_world import COLUMNS, LOOKAHEAD, Run, World

from ssd.speculation.controller import Choice, Controller, Reason
from ssd.speculation.estimates import Calibration, Mean

START_SECONDS = 6.0
GOOD = World()
SLOWER = World(acceptance=0.35, hit_rate=0.6, wide_factor=2.0, table_factor=1.0)
USELESS = World(acceptance=0.02, hit_rate=0.3, table_factor=2.0)
UNEVEN = (0.3, 0.95, 0.5, 0.9, 0.6, 0.8, 0.75, 0.9, 0.85, 0.4, 0.9, 0.35)
"""Acceptance of texts as different as those of the embedded pair at T = 0."""

worlds = st.builds(
    World,
    batch=st.sampled_from([1, 3, 8, 16]),
    wide_factor=st.floats(1.0, 4.0),
    host_seconds=st.floats(0.0, 0.003),
    table_factor=st.floats(0.1, 12.0),
    hit_rate=st.floats(0.0, 1.0),
    acceptance=st.floats(0.0, 1.0),
    noise=st.floats(0.0, 0.25),
    opening_rounds=st.integers(1, 20),
    shared_core=st.floats(1.0, 3.0),
    tokens_a_chunk=st.sampled_from([math.inf, 112.0, 400.0]),
    chunk_factor=st.floats(1.0, 3.0),
)


simulated = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    # A run has thousands of rounds: shrinking would take minutes.
    phases=[Phase.explicit, Phase.generate],
)


class FixedLength(Controller):
    """Always speculates, with proposals of at most ``length`` tokens."""

    length = LOOKAHEAD

    def choose(self, _num_sequences: int) -> Choice:
        return Choice(is_on=self.length > 0, max_proposed=self.length)


def fixed(world: World, length: int, seed: int = 0) -> Run:
    """A run that makes one choice, plain decoding if the length is 0."""
    run = Run(world, seed)
    run.controller = FixedLength(COLUMNS, LOOKAHEAD)
    run.controller.length = length
    return run


def ran(world: World, seconds: float = START_SECONDS) -> Run:
    """A run that has lasted for so long."""
    run = Run(world)
    run.run(seconds)
    return run


@simulated
@given(world=worlds, seed=st.integers(0, 1000))
def test_after_its_start_it_is_never_slower_than_98_percent_of_plain_decoding(
    world: World, seed: int
) -> None:
    run = Run(world, seed)
    run.run(START_SECONDS)
    assert run.run(30.0) >= 0.98 * world.plain_rate()


@simulated
@given(world=worlds, seed=st.integers(0, 1000))
def test_in_a_world_that_does_not_change_it_settles(world: World, seed: int) -> None:
    run = Run(world, seed)
    run.run(40.0)
    # Where both choices are equally fast, noise may turn it several times.
    assert run.changes <= 8


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    "world",
    [
        World(texts=UNEVEN, wide_factor=1.9, opening_rounds=1),
        World(acceptance=0.1, hit_rate=0.8, wide_factor=1.9, opening_rounds=1),
        World(texts=UNEVEN, hit_rate=0.3, opening_rounds=1),
        World(acceptance=0.1, table_factor=1.2, opening_rounds=1),
        World(acceptance=0.6, hit_rate=0.5, shared_core=1.4, opening_rounds=1),
        World(texts=UNEVEN, wide_factor=1.9, table_factor=1.2, table_columns=True),
    ],
    ids=["good", "random draft", "slow draft", "no gain", "shared core", "long tables"],
)
def test_it_is_as_fast_as_the_better_mode_from_the_first_texts_on(world: World, batch: int) -> None:
    world = replace(world, batch=batch)
    first, whole = [], []
    for seed in range(3):
        run, forced = Run(world, seed), fixed(world, LOOKAHEAD, seed)
        first.append(run.run_texts(5) / max(forced.run_texts(5), world.plain_rate()))
        whole.append(run.run_texts(24) / max(forced.run_texts(24), world.plain_rate()))
        assert run.run_texts(24) > 0.95 * world.plain_rate()
    assert median(first) > 0.85
    assert median(whole) > 0.95


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_speculation_that_pays_stays_on(batch: int) -> None:
    run = ran(replace(GOOD, batch=batch))
    assert run.run(30.0) > 2.2 * run.world.plain_rate()
    assert run.changes == 0
    report = run.controller.report()
    assert (report.is_on, report.reason) == (True, Reason.FASTER)
    assert report.speed_up > 2.0


@pytest.mark.parametrize("tokens_a_chunk", [112, 224])
def test_speculation_that_slows_the_storing_of_prompts_is_turned_off(tokens_a_chunk: float) -> None:
    # The draft computes during chunks, so its tables are there when a round begins.
    world = World(
        batch=16, tokens_a_chunk=tokens_a_chunk, chunk_seconds=tokens_a_chunk / 600, chunk_factor=3
    )
    run = ran(world, 20.0)
    assert not run.controller.report().is_on
    assert run.run(30.0) > 0.98 * world.plain_rate()


def test_where_every_round_has_a_chunk_both_choices_are_still_measured() -> None:
    report = ran(World(tokens_a_chunk=0.001)).controller.report()
    assert (report.is_on, report.reason) == (True, Reason.FASTER)
    assert report.speed_up > 2.0


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_speculation_that_does_not_pay_is_off_within_two_seconds(batch: int) -> None:
    run = ran(replace(USELESS, batch=batch), 2.0)
    report = run.controller.report()
    assert (report.is_on, report.reason) == (False, Reason.SLOWER)
    assert report.speed_up < 0.7
    assert run.run(60.0) > 0.98 * run.world.plain_rate()
    assert run.changes == 1


@pytest.mark.parametrize("batch", [1, 16])
def test_it_comes_back_on_when_speculation_pays_again(batch: int) -> None:
    run = ran(replace(USELESS, batch=batch), 60.0)
    run.world = replace(GOOD, batch=batch)
    run.run(60.0)
    assert run.controller.report().is_on
    assert run.run(10.0) > 2.0 * run.world.plain_rate()


def test_it_comes_back_on_although_the_sessions_of_a_large_batch_open_slowly() -> None:
    run = ran(replace(USELESS, batch=16), 60.0)
    run.world = replace(GOOD, batch=16, shared_core=1.4, opening_rounds=40)
    run.run(60.0)
    assert run.controller.report().is_on


@pytest.mark.parametrize("batch", [1, 16])
def test_it_turns_off_within_two_seconds_of_a_draft_that_becomes_useless(batch: int) -> None:
    run = ran(replace(GOOD, batch=batch), 60.0)
    run.world = replace(USELESS, batch=batch)
    run.run(2.0)
    assert not run.controller.report().is_on


@pytest.mark.parametrize("batch", [1, 16])
def test_where_rounds_are_long_one_trial_turns_it_off(batch: int) -> None:
    run = ran(replace(GOOD, batch=batch, plain_seconds=0.4), 600.0)
    run.world = replace(SLOWER, batch=batch, plain_seconds=0.4)
    for _ in range(60):
        run.round()
    assert not run.controller.report().is_on


def test_a_slower_machine_does_not_turn_speculation_off() -> None:
    run = ran(GOOD, 20.0)
    run.world = replace(GOOD, plain_seconds=0.04, host_seconds=0.004)
    run.run(60.0)
    assert run.controller.report().is_on


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("world", "length", "share"),
    [(GOOD, LOOKAHEAD, 0.9), (SLOWER, 0, 0.98)],
    ids=["speculation pays", "speculation does not pay"],
)
def test_the_faster_choice_stays_beside_other_work_in_bursts(
    world: World, length: int, share: float, batch: int
) -> None:
    noisy = replace(world, batch=batch, burst_seconds=0.2, calm_seconds=0.5, burst_factor=4.0)
    ratios = []
    for seed in range(4):
        run = Run(noisy, seed)
        run.run(START_SECONDS)
        ratios.append(run.run(60.0) / fixed(noisy, length, seed).run(60.0))
    assert fmean(ratios) > share


@pytest.mark.parametrize("tokens_a_chunk", [math.inf, 1.0])
@pytest.mark.parametrize("rounds", range(3, 40, 4))
def test_a_pause_of_the_machine_does_not_turn_speculation_off(
    rounds: int, tokens_a_chunk: float
) -> None:
    run = ran(replace(GOOD, tokens_a_chunk=tokens_a_chunk), 5.0)
    assert run.controller.report().is_on
    before = run.tokens
    for number in range(100):
        run.stall_seconds = 10.0 if number == rounds else 0.0
        run.round()
    assert run.tokens - before > 250
    assert run.controller.report().is_on


@pytest.mark.parametrize("rounds", range(6))
def test_a_pause_of_the_machine_in_a_trial_does_not_end_it(rounds: int) -> None:
    run = ran(USELESS, 2.0)
    assert not run.controller.report().is_on
    run.world = GOOD
    while not run.controller.choose(1).is_on:
        run.round()
    for number in range(60):
        run.stall_seconds = 1.0 if number == rounds else 0.0
        run.round()
    assert run.controller.report().is_on


@pytest.mark.parametrize("batch", [1, 8])
def test_rare_long_waits_for_tables_count_in_full(batch: int) -> None:
    world = replace(GOOD, batch=batch, long_wait_seconds=0.5)
    run = ran(world)
    assert run.run(30.0) > 0.96 * world.plain_rate()
    assert not run.controller.report().is_on


@pytest.mark.parametrize("batch", [1, 8])
def test_speculation_that_no_longer_pays_is_reported_as_slower(batch: int) -> None:
    run = ran(replace(GOOD, batch=batch), 10.0)
    assert run.controller.report().speed_up > 2.0
    run.world = replace(USELESS, batch=batch)
    while run.controller.report().is_on:
        run.run(0.1)
    assert 0.0 < run.controller.report().speed_up < 1.0


def test_sessions_that_never_open_on_a_shared_core_cost_at_most_two_percent() -> None:
    run = ran(GOOD, 5.0)
    run.world = replace(USELESS, shared_core=2.5)
    run.run(30.0)
    run.world = replace(GOOD, shared_core=2.5, opening_rounds=100_000)
    assert run.run(150.0) > 0.98 * run.world.plain_rate()


def test_drafts_that_never_answer_are_turned_off() -> None:
    report = ran(World(opening_rounds=10**9)).controller.report()
    assert (report.is_on, report.reason) == (False, Reason.SLOWER)
    assert 0.5 < report.speed_up < 1.0


def test_drafts_that_have_room_for_few_of_the_sequences_stay_in_use_while_they_gain() -> None:
    run = ran(replace(GOOD, batch=16, most_sessions=5), 60.0)
    report = run.controller.report()
    assert (report.is_on, report.reason) == (True, Reason.FASTER)
    assert report.speed_up > 1.1


def test_beside_a_request_that_forces_speculation_sessions_do_not_open_again_and_again() -> None:
    run = ran(replace(SLOWER, batch=4, num_forced=1), 100.0)
    assert not run.controller.report().is_on
    assert run.num_openings <= 10


def test_without_drafts_it_stays_at_its_first_choice() -> None:
    report = ran(replace(GOOD, has_drafts=False), 20.0).controller.report()
    assert (report.is_on, report.reason, report.speed_up) == (True, Reason.MEASURING, 0.0)


def test_drafts_that_disappear_are_no_reason_to_turn_off() -> None:
    run = ran(GOOD, 20.0)
    run.world = replace(GOOD, has_drafts=False)
    run.run(20.0)
    run.world = GOOD
    run.run(5.0)
    assert run.controller.report().is_on


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_rejected_positions_are_not_proposed(*, is_calibrated: bool) -> None:
    world = replace(GOOD, batch=8, acceptance=0.5, wide_factor=2.0, table_factor=0.3)
    report = ran(replace(world, is_calibrated=is_calibrated), 20.0).controller.report()
    assert report.is_on
    assert report.max_proposed < LOOKAHEAD


@pytest.mark.parametrize("is_calibrated", [True, False])
@pytest.mark.parametrize(
    "world",
    [
        GOOD,
        replace(GOOD, batch=16),
        replace(GOOD, batch=8, acceptance=0.5, wide_factor=2.0, table_factor=0.3),
        replace(GOOD, batch=8, acceptance=0.6, table_factor=2.0),
        replace(GOOD, batch=3, hit_rate=0.6, shared_core=1.3),
    ],
)
def test_it_is_within_8_percent_of_the_best_fixed_choice(
    world: World, *, is_calibrated: bool
) -> None:
    world = replace(world, is_calibrated=is_calibrated)
    oracle = world.plain_rate()
    for columns in COLUMNS[1:]:
        oracle = max(oracle, fixed(world, columns - 1).run(10.0))
    assert ran(world).run(30.0) > 0.92 * oracle


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_a_flat_verify_keeps_full_proposals(*, is_calibrated: bool) -> None:
    world = replace(GOOD, acceptance=0.6, wide_factor=1.0, noise=0.02)
    run = ran(replace(world, is_calibrated=is_calibrated), 20.0)
    assert run.controller.report().max_proposed == LOOKAHEAD


def test_each_load_has_its_own_choice() -> None:
    good, bad = GOOD, replace(USELESS, batch=16)
    run = Run(good)
    for _ in range(3):
        for world in (good, bad):
            run.world = world
            run.run(10.0)
    assert not run.controller.report().is_on
    run.world = good
    run.run(1.0)
    assert run.controller.report().is_on


def fill_and_drain(run: Run, repetitions: int, full_rounds: int) -> float:
    """Run batches of changing sizes; return tokens/s divided by tokens/s of plain decoding."""
    seconds_before, plain_seconds = run.seconds, 0.0
    for _ in range(repetitions):
        for batch, rounds in ((2, 3), (4, 5), (7, 9), (16, full_rounds), (5, 10), (2, 4)):
            run.world = replace(USELESS, batch=batch)
            tokens_before = run.tokens
            for _ in range(rounds):
                run.round()
            plain_seconds += (run.tokens - tokens_before) / run.world.plain_rate()
    return plain_seconds / (run.seconds - seconds_before)


def test_batches_that_fill_and_drain_lose_at_most_two_percent() -> None:
    assert fill_and_drain(ran(replace(USELESS, batch=16)), 60, full_rounds=60) > 0.98


@pytest.mark.parametrize("full_rounds", [10, 11, 14, 16])
def test_where_batches_are_full_for_a_few_rounds_only_trials_still_end(full_rounds: int) -> None:
    run = Run(replace(USELESS, batch=16))
    fill_and_drain(run, 30, full_rounds)
    assert fill_and_drain(run, 60, full_rounds) > 0.96


def test_rounds_without_proposals_do_not_shorten_them() -> None:
    run = Run(replace(GOOD, opening_rounds=40, batch=1))
    for _ in range(36):
        run.round()
    assert run.controller.choose(1) == Choice(is_on=True, max_proposed=LOOKAHEAD)


def test_a_short_change_of_load_keeps_the_choice() -> None:
    controller = Controller((1, 7), LOOKAHEAD)
    assert controller.choose(1) == Choice(is_on=True, max_proposed=LOOKAHEAD)
    for num_sequences in (1, 2, 1, 4, 1):
        assert controller.choose(num_sequences).is_on


def test_calibrated_times_are_interpolated() -> None:
    times = {(1, 1): 1.0, (1, 4): 4.0, (7, 1): 2.0, (7, 4): 10.0}
    calibration = Calibration(times)
    assert calibration.verify_seconds(1, 1) == 1.0
    assert calibration.verify_seconds(1, 2) == 2.0
    assert calibration.verify_seconds(1, 8) == 8.0
    assert calibration.verify_seconds(4, 1) == 1.5
    assert calibration.verify_seconds(4, 8) == 14.0
    assert Calibration(times | {(6, 1): 1.1}).verify_seconds(5, 1) == pytest.approx(1.08)
    assert Calibration().verify_seconds(4, 8) == 1.0


def test_old_samples_lose_their_weight_in_a_mean() -> None:
    mean = Mean(4)
    for sample in [8.0] * 10 + [2.0] * 100:
        mean.add(sample)
    assert mean.value == pytest.approx(2.0)
