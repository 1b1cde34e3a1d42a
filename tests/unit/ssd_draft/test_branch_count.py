"""A table gets fewer branches if more columns are then ready in time."""

import numpy as np
from numpy.typing import NDArray

from ssd_draft.branch_count import TRY_TABLES, BranchChoice, Timing

COUNTS = (24, 12, 6)
LOOKAHEAD = 6
FALLING_BN = np.array([[0.5 * 0.6**n for n in range(24)]])
"""Probabilities of outcomes: six branches have .95 of what 24 have."""
EQUAL_BN = np.full((1, 24), 1 / 24)


def in_time(seconds: float) -> Timing:
    """Return the timing of a draft that begins at once and has some time."""
    return Timing(seconds, 0.0)


def measured(first: float = 0.005, step: float = 0.003) -> BranchChoice:
    choice = BranchChoice(COUNTS, LOOKAHEAD)
    for _ in range(10):
        choice.note_first(1, 24, first)
        for _ in range(LOOKAHEAD - 1):
            choice.note_step(1, 24, step)
    return choice


def test_a_draft_that_has_the_time_takes_all_branches() -> None:
    assert measured().choose(1, in_time(0.1), FALLING_BN) == 24


def test_a_draft_without_the_time_takes_fewer_branches() -> None:
    assert measured().choose(1, in_time(0.008), FALLING_BN) < 24


def test_branches_that_are_all_needed_are_kept() -> None:
    assert measured().choose(1, in_time(0.012), EQUAL_BN) == 24


def test_a_draft_that_is_always_late_takes_the_branches_with_the_earliest_column() -> None:
    assert measured().choose(1, in_time(0.001), FALLING_BN) == 6


def test_branches_are_kept_if_much_more_time_is_spent_already() -> None:
    assert measured().choose(1, Timing(0.001, 0.5), EQUAL_BN) == 24


def test_all_branches_are_taken_while_nothing_is_known() -> None:
    assert BranchChoice(COUNTS, LOOKAHEAD).choose(1, in_time(0.008), FALLING_BN) == 24
    assert measured().choose(4, in_time(0.008), FALLING_BN) == 24
    assert measured().choose(1, None, FALLING_BN) == 24
    assert measured().choose(1, in_time(0.008), None) == 24


def test_fewer_branches_that_save_no_time_are_given_up() -> None:
    choice = measured()
    chosen = [used(choice, 0.008, FALLING_BN, first=0.005, step=0.003) for _ in range(320)]
    assert chosen[0] < 24
    assert chosen[20:].count(24) >= 0.9 * 300


def test_slow_tables_do_not_exclude_their_branches_for_ever() -> None:
    choice = measured(first=0.06, step=0.06)
    chosen = [used(choice, 0.02, EQUAL_BN, first=0.005, step=0.002) for _ in range(20 * TRY_TABLES)]
    assert chosen[0] == 6
    assert set(chosen[-100:]) == {24}


def test_a_draft_that_has_the_time_tries_nothing() -> None:
    choice = measured()
    chosen = [used(choice, 0.1, FALLING_BN, first=0.005, step=0.003) for _ in range(100)]
    assert set(chosen) == {24}


def test_steps_of_a_batch_that_has_lost_sessions_are_not_needed() -> None:
    choice = measured()
    choice.note_step(9, 24, 0.1)
    assert choice.choose(9, in_time(0.008), FALLING_BN) == 24


def test_columns_that_come_together_count_with_the_time_of_all() -> None:
    choice = BranchChoice(COUNTS, LOOKAHEAD)
    for branches, seconds in ((24, 0.008), (12, 0.005), (6, 0.003)):
        choice.note_first(1, branches, seconds, LOOKAHEAD)
    assert [choice.choose(1, in_time(each), FALLING_BN) for each in (0.009, 0.002)] == [24, 6]
    assert choice.choose(1, in_time(0.007), EQUAL_BN) == 24, "the target waits"


def used(
    choice: BranchChoice,
    seconds: float,
    probability_BN: NDArray[np.float64],
    *,
    first: float,
    step: float,
) -> int:
    """Choose, and measure tables whose times do not depend on the branches."""
    branches = choice.choose(1, in_time(seconds), probability_BN)
    choice.note_first(1, branches, first)
    for _ in range(LOOKAHEAD - 1):
        choice.note_step(1, branches, step)
    return branches
