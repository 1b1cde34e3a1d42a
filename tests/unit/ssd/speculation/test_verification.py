"""Coupled verification: the longest equal prefix, then the bonus token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.speculation.verification import verify_coupled
from ssd.types import Outcome

NUM_TOKENS = 3
LOOKAHEAD = 4


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
