"""A table gets fewer branches or columns if it is then ready in time."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ssd_draft.table_size import TRY_TABLES, Need, Size, SizeChoice

COUNTS = (24, 12, 6)
LOOKAHEAD = 6
LENGTHS = (3, LOOKAHEAD)
FALLING_BN = np.array([[0.5 * 0.6**n for n in range(24)]])
"""Probabilities of outcomes: six branches have .95 of what 24 have."""
EQUAL_BN = np.full((1, 24), 1 / 24)


def in_time(seconds: float, acceptance: float = 0.8, wanted: int = LOOKAHEAD) -> Need:
    """Return the need of a target from a draft that begins at once."""
    return Need(seconds, 0.0, (acceptance,), wanted)


def full(branches: int) -> Size:
    return Size(branches, LOOKAHEAD)


def branches(
    choice: SizeChoice, need: Need | None, probability_BN: NDArray[np.float64] | None
) -> int:
    """Return the number of branches of a table of K columns."""
    return choice.choose(1, (LOOKAHEAD,), need, probability_BN).branches


def measured(first: float = 0.005, step: float = 0.003) -> SizeChoice:
    choice = SizeChoice(COUNTS)
    for _ in range(10):
        choice.add_first(1, full(24), first)
        for _ in range(LOOKAHEAD - 1):
            choice.add_step(1, full(24), step)
    return choice


def test_a_draft_that_has_the_time_takes_all_branches() -> None:
    assert branches(measured(), in_time(0.1), FALLING_BN) == 24


def test_a_draft_without_the_time_takes_fewer_branches() -> None:
    assert branches(measured(), in_time(0.008), FALLING_BN) < 24


def test_branches_that_are_all_needed_are_kept() -> None:
    assert branches(measured(), in_time(0.012), EQUAL_BN) == 24


def test_a_draft_that_is_always_late_takes_the_branches_with_the_earliest_column() -> None:
    assert branches(measured(), in_time(0.001), FALLING_BN) == 6


def test_branches_are_kept_if_much_more_time_is_spent_already() -> None:
    assert branches(measured(), Need(0.001, 0.5, (0.8,), LOOKAHEAD), EQUAL_BN) == 24


def test_the_largest_size_is_taken_while_nothing_is_known() -> None:
    assert SizeChoice(COUNTS).choose(1, LENGTHS, in_time(0.008), FALLING_BN) == full(24)
    assert measured().choose(4, LENGTHS, in_time(0.008), FALLING_BN) == full(24)
    assert measured().choose(1, LENGTHS, None, FALLING_BN) == full(24)
    assert measured().choose(1, LENGTHS, in_time(0.008), None) == full(24)


def test_a_choice_that_is_not_adaptive_takes_the_largest_size() -> None:
    choice = SizeChoice(COUNTS, is_adaptive=False)
    choice.add_first(1, full(24), 0.01)
    assert choice.choose(1, LENGTHS, in_time(0.001), FALLING_BN) == full(24)


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
    choice.add_step(9, full(24), 0.1)
    assert choice.choose(9, LENGTHS, in_time(0.008), FALLING_BN) == full(24)


def whole() -> SizeChoice:
    """Return a choice that has measured whole tables: 1 ms, and .06 ms a row."""
    choice = SizeChoice(COUNTS)
    for count in COUNTS:
        for length in LENGTHS:
            seconds = 0.001 + 6e-5 * count * (length + 1)
            choice.add_first(1, Size(count, length), seconds, length)
    return choice


def test_columns_that_come_together_count_with_the_time_of_all() -> None:
    chosen = [branches(whole(), in_time(each), FALLING_BN) for each in (0.012, 0.002)]
    assert chosen == [24, 6]
    assert branches(whole(), in_time(0.010), EQUAL_BN) == 24, "the target waits"


@pytest.mark.parametrize(("acceptance", "length"), [(0.95, LOOKAHEAD), (0.6, 3)])
def test_whole_tables_are_shorter_where_few_tokens_are_accepted(
    acceptance: float, length: int
) -> None:
    assert whole().choose(1, LENGTHS, in_time(0.002, acceptance), FALLING_BN).length == length
    assert whole().choose(1, LENGTHS, in_time(0.1, acceptance), FALLING_BN) == full(24)


def test_one_text_that_is_always_accepted_is_worth_long_tables_beside_one_that_never_is() -> None:
    def length(*acceptances: float) -> int:
        need = replace(in_time(0.002), acceptances=acceptances)
        return whole().choose(1, LENGTHS, need, FALLING_BN).length

    assert length(0.95, 0.05) > length(0.5, 0.5)


def test_columns_that_the_target_does_not_use_are_worth_nothing() -> None:
    assert whole().choose(1, LENGTHS, in_time(0.002, 0.95), FALLING_BN).length == LOOKAHEAD
    assert whole().choose(1, LENGTHS, in_time(0.002, 0.95, wanted=3), FALLING_BN).length == 3


def test_steps_take_as_long_in_tables_of_another_length() -> None:
    assert measured().choose(1, (4,), in_time(0.1), FALLING_BN) == Size(24, 4)
    assert measured().choose(1, (4,), in_time(0.008), FALLING_BN).branches < 24


def test_one_column_of_several_sessions_is_a_step_of_longer_tables() -> None:
    choice = SizeChoice(COUNTS)
    choice.add_first(2, Size(24, 1), 0.004)
    assert choice.choose(2, (LOOKAHEAD,), in_time(0.012), FALLING_BN).branches < 24


def test_a_shorter_table_is_expected_to_take_less_time_before_it_is_measured() -> None:
    choice = SizeChoice((6,))
    choice.add_first(1, full(6), 0.01, LOOKAHEAD)
    assert choice.choose(1, LENGTHS, in_time(0.005, 0.6), FALLING_BN) == Size(6, 3)


def used(
    choice: SizeChoice,
    seconds: float,
    probability_BN: NDArray[np.float64],
    *,
    first: float,
    step: float,
) -> int:
    """Choose, and measure tables whose times do not depend on the branches."""
    size = choice.choose(1, (LOOKAHEAD,), in_time(seconds), probability_BN)
    choice.add_first(1, size, first)
    for _ in range(LOOKAHEAD - 1):
        choice.add_step(1, size, step)
    return size.branches
