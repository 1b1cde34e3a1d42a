"""The measured acceptances of the draft and of n-grams."""

import pytest
from tests.unit.ssd.speculation.measured import measure

from ssd.speculation.sources import Candidates, Sources


def test_the_tokens_of_a_round_test_the_proposals_of_both_sources() -> None:
    found = Sources()
    for _ in range(400):
        # The first two tokens are selected, the third one is not. The second round ends before
        # the test of all tokens. The third one has no proposals.
        found.add_round(
            [
                (Candidates((1, 2, 9, 4), (1, 8)), (1, 2, 3, 4)),
                (Candidates((5, 6, 7), (4, 6, 7)), (5, 6)),
                (Candidates(), (1, 2)),
            ]
        )
    assert found.acceptances(repeats=False) == pytest.approx((4 / 5, 1 / 3), rel=1e-2)
    assert found.acceptances(repeats=True) == (0.8, 0.75), "no such text"


def test_texts_that_repeat_themselves_have_acceptances_of_their_own() -> None:
    found = Sources()
    for _ in range(400):
        found.add_round([(Candidates((1, 9), (1, 2), repeats=True), (1, 2))])
    assert found.acceptances(repeats=True) == pytest.approx((0.5, 0.95), rel=1e-2)
    assert found.acceptances(repeats=False) == (0.8, 0.5)


def test_a_round_has_one_token_more_than_the_target_accepts() -> None:
    found = Sources()
    measure(found, 0.8, 0.5, repeats=False)
    expected = 1 + 0.8 + 0.8**2 * (1 + 0.5 + 0.25)
    assert found.expected_tokens(2, 2, repeats=False) == pytest.approx(expected, rel=1e-3)
    assert found.expected_tokens(0, 0, repeats=False) == pytest.approx(1.0)
