"""Coupled verification: the longest equal prefix, then the bonus token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.speculation.verification import verify_coupled
from ssd.types import Outcome

TOKEN = st.integers(0, 2)


def test_choices_after_the_first_other_one_are_not_read() -> None:
    assert verify_coupled([5, 9, 7], [5, 6]) == Outcome(1, 6)


@given(st.lists(TOKEN, max_size=4), st.lists(TOKEN, min_size=5, max_size=5))
@settings(max_examples=200, deadline=None)
def test_the_longest_equal_prefix_is_accepted(proposal: list[int], chosen: list[int]) -> None:
    longest = max(k for k in range(len(proposal) + 1) if proposal[:k] == chosen[:k])
    assert verify_coupled(proposal, chosen) == Outcome(longest, chosen[longest])
