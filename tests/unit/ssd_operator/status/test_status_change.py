from copy import deepcopy

import pytest

from ssd_operator.api.spec import Object
from ssd_operator.status.status_change import needs_write

STATUS: Object = {
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Serving",
            "message": "1 of 1 targets serve.",
            "lastTransitionTime": "then",
        }
    ],
    "draft": {"summary": "1/1", "lastScaleTime": "then"},
    "links": [{"target": "t", "draft": "d", "roundTripMicroseconds": 100, "state": "Active"}],
    "speculation": {"tokensPerRound": "3.1", "hitRate": "0.86"},
}


def changed(*path: str | int, to: object) -> Object:
    status = deepcopy(STATUS)
    part = status
    for name in path[:-1]:
        part = part[name]  # type: ignore[index]
    part[path[-1]] = to  # type: ignore[index]
    return status


FLIPS = [
    changed("conditions", 0, "status", to="False"),
    changed("conditions", 0, "reason", to="ServingPartly"),
    changed("conditions", 0, "message", to="1 of 2 targets serve."),
    changed("draft", "summary", to="0/1"),
    changed("observedGeneration", to=2),
    changed("links", 0, "state", to="Lost"),
    changed("links", to=[]),
    changed("links", 0, "reason", to="link_too_slow: 312 us"),
    changed("links", 0, "roundTripMicroseconds", to=0),
]


@pytest.mark.parametrize("new", FLIPS)
def test_a_change_of_state_is_written_at_once_but_not_twice_a_second(new: Object) -> None:
    assert needs_write(STATUS, new, 1.0)
    assert not needs_write(STATUS, new, 0.9)


@pytest.mark.parametrize(
    "new",
    [
        STATUS,
        changed("conditions", 0, "lastTransitionTime", to="now"),
        changed("draft", "lastScaleTime", to="now"),
        changed("links", 0, "roundTripMicroseconds", to=199),
        changed("links", 0, "roundTripMicroseconds", to=51),
        changed("speculation", "hitRate", to="0.90"),
    ],
)
def test_times_and_small_changes_of_measurements_are_never_written(new: Object) -> None:
    assert not needs_write(STATUS, new)


@pytest.mark.parametrize("micros", [200, 50])
def test_a_measurement_that_changed_by_a_factor_of_two_waits_five_minutes(micros: int) -> None:
    new = changed("links", 0, "roundTripMicroseconds", to=micros)
    assert not needs_write(STATUS, new, 299.9)
    assert needs_write(STATUS, new, 300)


def test_new_numbers_in_the_reason_of_a_link_wait_five_minutes() -> None:
    old, new = (
        changed("links", 0, "reason", to=f"link_too_slow: {micros} us")
        for micros in ("312.5", "290")
    )
    assert not needs_write(old, new, 299.9)
    assert needs_write(old, new, 300)


@pytest.mark.parametrize(
    "new", [changed("speculation", "tokensPerRound", to="3.2"), changed("speculation", to={})]
)
def test_speculation_figures_wait_a_minute(new: Object) -> None:
    assert not needs_write(STATUS, new, 59.9)
    assert needs_write(STATUS, new, 60)
    assert needs_write(new, STATUS, 60)


def test_the_first_status_is_written() -> None:
    assert needs_write({}, STATUS)
