"""Coupled verification: the longest equal prefix, then the bonus token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.speculation.verification import verify_coupled
from ssd.types import Outcome

NUM_TOKENS = 3
LOOKAHEAD = 4


def verify(proposal: list[int], num_proposed: int, chosen: list[int]) -> tuple[int, int]:
    """Return the outcome (k, t*) of one sequence."""
    (outcome,) = verify_coupled(np.array([proposal]), np.array([num_proposed]), np.array([chosen]))
    return outcome.accepted, outcome.bonus


def test_a_proposal_that_equals_all_choices_is_accepted_and_followed_by_the_bonus() -> None:
    assert verify([5, 6, 7], 3, [5, 6, 7, 8]) == (3, 8)


def test_the_first_different_choice_is_the_bonus() -> None:
    assert verify([5, 9, 7], 3, [5, 6, 7, 8]) == (1, 6)


def test_an_equal_token_after_a_different_one_is_not_accepted() -> None:
    assert verify([9, 6, 7], 3, [5, 6, 7, 8]) == (0, 5)


def test_padding_is_never_accepted() -> None:
    assert verify([5, 6, 7], 1, [5, 6, 7, 8]) == (1, 6)


def test_no_proposal_is_plain_decoding() -> None:
    assert verify([-1, -1, -1], 0, [5, -1, -1, -1]) == (0, 5)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    """Draw a proposal, its length and the target's choices, over few tokens."""
    token = st.integers(0, NUM_TOKENS - 1)
    proposal = draw(st.lists(token, min_size=LOOKAHEAD, max_size=LOOKAHEAD))
    chosen = draw(st.lists(token, min_size=LOOKAHEAD + 1, max_size=LOOKAHEAD + 1))
    return proposal, draw(st.integers(0, LOOKAHEAD)), chosen


@given(st.lists(rows(), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_each_row_accepts_its_longest_equal_prefix(
    batch: list[tuple[list[int], int, list[int]]],
) -> None:
    proposals, nums, chosens = zip(*batch, strict=True)
    outcomes = verify_coupled(np.array(proposals), np.array(nums), np.array(chosens))
    for outcome, (proposal, num, chosen) in zip(outcomes, batch, strict=True):
        longest = max(k for k in range(num + 1) if proposal[:k] == chosen[:k])
        assert outcome == Outcome(longest, chosen[longest])
