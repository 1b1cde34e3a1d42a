from hypothesis import given
from hypothesis import strategies as st

from ssd_operator.status.conditions import (
    LONGEST_MESSAGE,
    Condition,
    Truth,
    first_not_true,
    merge,
    no,
    unknown,
    yes,
)

THEN, NOW = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
conditions = st.lists(
    st.builds(Condition, st.sampled_from("ABC"), st.sampled_from(Truth), st.text(), st.text()),
    unique_by=lambda condition: condition.kind,
)


def test_a_condition_says_whose_generation_it_judged() -> None:
    assert merge([], [yes("Ready", "Serving", "All is well.")], 4, NOW) == [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Serving",
            "message": "All is well.",
            "observedGeneration": 4,
            "lastTransitionTime": NOW,
        }
    ]


@given(conditions, conditions)
def test_the_time_moves_when_the_truth_does_and_only_then(
    old: list[Condition], new: list[Condition]
) -> None:
    truths = {condition.kind: condition.truth for condition in old}
    for found in merge(merge([], old, 1, THEN), new, 2, NOW):
        has_flipped = truths.get(found["type"]) != found["status"]
        assert found["lastTransitionTime"] == (NOW if has_flipped else THEN)


@given(conditions, conditions)
def test_what_is_not_said_any_more_is_gone(old: list[Condition], new: list[Condition]) -> None:
    kinds = [found["type"] for found in merge(merge([], old, 1, THEN), new, 2, NOW)]
    assert kinds == [condition.kind for condition in new]


def test_long_words_are_cut() -> None:
    (found,) = merge([], [no("Ready", "X", "y" * 5000)], 1, NOW)
    assert len(found["message"]) == LONGEST_MESSAGE


def test_the_first_reason_wins() -> None:
    good, bad, dim = yes("A", "", ""), no("B", "", ""), unknown("C", "", "")
    assert first_not_true([good, dim, bad]) == dim
    assert first_not_true([good]) is None
