from hypothesis import given
from hypothesis import strategies as st

from ssd_operator.status.conditions import LONGEST_MESSAGE, Condition, merge, no, yes

THEN, NOW = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
conditions = st.dictionaries(
    st.sampled_from("ABC"),
    st.builds(Condition, st.sampled_from(["True", "False", "Unknown"]), st.text(), st.text()),
)


def test_a_condition_has_the_generation_that_it_describes() -> None:
    assert merge({}, {"Ready": yes("Serving", "1 of 1 targets serve.")}, 4, NOW) == [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Serving",
            "message": "1 of 1 targets serve.",
            "observedGeneration": 4,
            "lastTransitionTime": NOW,
        }
    ]


@given(conditions, conditions)
def test_the_time_changes_only_with_the_status_and_old_conditions_are_dropped(
    old: dict[str, Condition], new: dict[str, Condition]
) -> None:
    merged = merge({"conditions": merge({}, old, 1, THEN)}, new, 2, NOW)
    assert [found["type"] for found in merged] == list(new)
    for found in merged:
        before = old.get(found["type"])
        is_same = before is not None and before.status == found["status"]
        assert found["lastTransitionTime"] == (THEN if is_same else NOW)


def test_a_long_message_is_cut() -> None:
    (found,) = merge({}, {"Ready": no("X", "y" * 5000)}, 1, NOW)
    assert len(found["message"]) == LONGEST_MESSAGE
