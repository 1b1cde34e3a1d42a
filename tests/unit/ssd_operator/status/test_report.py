from copy import deepcopy

import pytest

from ssd_operator.api.spec import Object
from ssd_operator.status.report import needs_write

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
    changed("links", 0, "roundTripMicroseconds", to=0),
]


@pytest.mark.parametrize("new", FLIPS)
def test_a_change_of_state_is_written_at_once_but_not_twice_a_second(new: Object) -> None:
    assert needs_write(STATUS, new, 1.0)
    assert not needs_write(STATUS, new, 0.9)


@pytest.mark.parametrize(
    "new",
    [
        changed("links", 0, "roundTripMicroseconds", to=200),
        changed("links", 0, "reason", to="link_too_slow: 312 us"),
        changed("speculation", "tokensPerRound", to="3.2"),
        changed("speculation", to={}),
    ],
)
def test_measured_values_wait_a_minute(new: Object) -> None:
    assert not needs_write(STATUS, new, 59.9)
    assert needs_write(STATUS, new, 60)
    assert needs_write(new, STATUS, 60)
    assert not needs_write(new, deepcopy(new), 1e9)


def test_the_demand_of_the_internal_loop_is_a_measured_value() -> None:
    scaled = changed("conditions", 0, "reason", to="Internal")
    new = deepcopy(scaled)
    new["conditions"][0]["message"] = "6.1 sequences speculate."
    assert not needs_write(scaled, new, 59.9)
    assert needs_write(scaled, new, 60)


def test_the_first_status_is_written() -> None:
    assert needs_write({}, STATUS, 1.0)
