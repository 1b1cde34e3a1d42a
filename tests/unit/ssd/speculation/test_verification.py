"""Coupled verification: the longest equal prefix, then the bonus token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.speculation.verification import verify_coupled
from ssd.types import Outcome

TOKEN = st.integers(0, 2)


@pytest.mark.parametrize(
    ("proposal", "chosen", "accepted"),
    [
        pytest.param([5, 6, 7], [5, 6, 7, 8], 3, id="all are accepted"),
        pytest.param([5, 9, 7], [5, 6, 7, 8], 1, id="the first different choice is the bonus"),
        pytest.param([9, 6, 7], [5, 6, 7, 8], 0, id="an equal token after a different one"),
        pytest.param([5, 9, 7], [5, 6], 1, id="rows after the different one are not read"),
        pytest.param([5], [5, 6, 7, 8], 1, id="padding is not read"),
        pytest.param([], [5], 0, id="plain decoding"),
    ],
)
def test_the_proposal_is_accepted_up_to_the_first_other_choice(
    proposal: list[int], chosen: list[int], accepted: int
) -> None:
    assert verify_coupled(proposal, chosen) == Outcome(accepted, chosen[accepted])


@given(st.lists(TOKEN, max_size=4), st.lists(TOKEN, min_size=5, max_size=5))
@settings(max_examples=200, deadline=None)
def test_the_longest_equal_prefix_is_accepted(proposal: list[int], chosen: list[int]) -> None:
    longest = max(k for k in range(len(proposal) + 1) if proposal[:k] == chosen[:k])
    assert verify_coupled(proposal, chosen) == Outcome(longest, chosen[longest])
