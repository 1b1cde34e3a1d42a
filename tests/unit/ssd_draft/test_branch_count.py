"""A table gets fewer branches if more columns are then ready in time."""

import numpy as np
import pytest

from ssd_draft.branch_count import BranchChoice

COUNTS = (24, 12, 6)
LOOKAHEAD = 6
FALLING_BN = np.array([[0.5 * 0.6**n for n in range(24)]])
"""Probabilities of outcomes: six branches have .95 of what 24 have."""
EQUAL_BN = np.full((1, 24), 1 / 24)


def measured(first: float = 0.005, step: float = 0.003) -> BranchChoice:
    choice = BranchChoice(COUNTS, LOOKAHEAD)
    choice.note_first(1, 24, first)
    for _ in range(100):
        choice.note_step(1, 24, step)
    return choice


def test_a_draft_that_has_the_time_takes_all_branches() -> None:
    assert measured().choose(1, 0.1, FALLING_BN) == 24


def test_a_draft_without_the_time_takes_fewer_branches() -> None:
    assert measured().choose(1, 0.008, FALLING_BN) < 24


def test_branches_that_are_all_needed_are_kept() -> None:
    assert measured().choose(1, 0.012, EQUAL_BN) == 24


def test_a_draft_that_is_always_late_takes_the_branches_with_the_earliest_column() -> None:
    assert measured().choose(1, 0.001, FALLING_BN) == 6


@pytest.mark.parametrize("probability_BN", [None, FALLING_BN])
def test_all_branches_are_taken_while_nothing_is_known(
    probability_BN: np.ndarray[tuple[int, int], np.dtype[np.float64]] | None,
) -> None:
    assert BranchChoice(COUNTS, LOOKAHEAD).choose(1, 0.008, probability_BN) == 24
    assert measured().choose(4, 0.008, probability_BN) == 24
    assert measured().choose(1, 0.0, probability_BN) == 24
    assert measured().choose(1, 0.008, None) == 24


def test_fewer_branches_that_save_no_time_are_given_up() -> None:
    choice = measured()
    for _ in range(20):
        branches = choice.choose(1, 0.008, FALLING_BN)
        choice.note_first(1, branches, 0.005)
        for _ in range(5):
            choice.note_step(1, branches, 0.003)
    assert choice.choose(1, 0.008, FALLING_BN) == 24
