"""What the operator writes into the status is what the definition keeps."""

import pytest
from tests.unit.ssd_operator.scenes import NOW, Scene, answer, draft, homeless, link, target

from ssd_operator.api.status_schema import status
from ssd_operator.api.structural import problems, stored
from ssd_operator.policy.scaling import Decision, Reason
from ssd_operator.policy.snapshot import Planned
from ssd_operator.status.status import status_of, status_of_invalid

SCHEMA = status()
HEALTHY = answer(
    "t0", link("d0", round_trip_seconds=120e-6), link("d1"), tokens_per_round=3.1, hit_rate=0.8
)
SCENES = {
    "nothing yet": Scene(pods=(), deployments=(), pools=(), planned=Planned()),
    "healthy": Scene(pools=(HEALTHY,)),
    "links without names": Scene(
        pools=(answer("t0", link("", address="10.0.0.1:50052"), link("", address="10.0.0.2:1")),)
    ),
    "no room": Scene(pods=(homeless(target(ready=False)), homeless(draft("d0", ready=False)))),
    "scaling": Scene(
        pools=(HEALTHY,),
        planned=Planned(decision=Decision(replicas=3, reason=Reason.SCALE_UP), is_scaling=True),
    ),
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=list(SCENES))
def test_a_status_loses_nothing_when_it_is_stored(scene: Scene) -> None:
    found = status_of(scene.resource, scene.observed, scene.planned, NOW)
    assert stored(found, SCHEMA) == found
    assert list(problems(found, SCHEMA, "status")) == []


def test_nor_does_that_of_a_resource_that_cannot_be_read() -> None:
    found = status_of_invalid({}, 2, ("SpecInvalid", "spec.target is missing"), NOW)
    assert stored(found, SCHEMA) == found
    assert list(problems(found, SCHEMA, "status")) == []
