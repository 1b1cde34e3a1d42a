"""Tokens in the time of a verify against the speed of the draft, on a virtual clock."""

from functools import cache

import pytest
from tests.unit.ssd_draft.ledger_draft import N
from tests.unit.ssd_draft.virtual_target import LOOKAHEAD, VirtualTarget

VERIFY_SECONDS = 0.02
NUM_ROUNDS = 60


@cache
def decoded(ratio: float) -> VirtualTarget:
    """Run a target whose draft needs ``ratio`` verifies for a table."""
    target = VirtualTarget(
        verify_seconds=VERIFY_SECONDS, step_seconds=ratio * VERIFY_SECONDS / LOOKAHEAD
    )
    target.run(NUM_ROUNDS)
    return target


@pytest.mark.parametrize(
    ("ratio", "longer", "kept"),
    [(0.8, 1, 0.9), (1, 1.5, 0.55), (1.5, 2, 0.55), (2, 4, 0.55), (4, 8, 0.55)],
)
def test_tokens_fall_smoothly_with_the_time_of_a_table(
    ratio: float, longer: float, kept: float
) -> None:
    before, after = decoded(ratio).tokens_per_verify, decoded(longer).tokens_per_verify
    # Whole tables only would yield 1 from ratio 1 on, if none were waited for.
    assert kept * before < after <= before


@pytest.mark.parametrize("ratio", [0.8, 1, 1.5, 2, 3, 4, 8])
def test_no_table_is_late_although_it_is_not_complete(ratio: float) -> None:
    assert decoded(ratio).counts.late == 0


@pytest.mark.parametrize("ratio", [4, 8, 12, 24])
def test_a_very_slow_draft_costs_nothing(ratio: float) -> None:
    assert decoded(ratio).tokens_per_verify > 0.98


def test_a_draft_that_is_fast_enough_sends_one_frame_a_round() -> None:
    target = decoded(0.8)
    assert set(target.counts.depths) == {LOOKAHEAD}
    assert target.num_frames_counted == target.counts.rounds


@pytest.mark.parametrize("ratio", [1.5, 2, 3])
def test_a_slow_draft_sends_about_two_frames_a_round(ratio: float) -> None:
    target = decoded(ratio)
    assert target.num_frames_counted <= 2.2 * target.counts.rounds


@pytest.mark.parametrize(("ratio", "expected"), [(0.5, {N}), (3, {N // 2, N // 4})])
def test_a_slow_draft_takes_fewer_branches_if_they_save_time(
    ratio: float, expected: set[int]
) -> None:
    target = VirtualTarget(
        verify_seconds=VERIFY_SECONDS,
        step_seconds=ratio * VERIFY_SECONDS / LOOKAHEAD,
        fan_out_policy="adaptive",
        fixed_share=0.2,
    )
    target.run(NUM_ROUNDS)
    widths = [len(table.bonus_N) for frame in target.link.frames for table in frame]
    newest = widths[len(widths) // 2 :]
    # A few tables measure other numbers of branches.
    assert sum(width in expected for width in newest) >= 0.9 * len(newest)
