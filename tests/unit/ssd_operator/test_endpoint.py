"""Ready needs more than a target: clients find it by the Service."""

import pytest
from tests.unit.ssd_operator.scenes import Scene

from ssd_operator.census import Planned
from ssd_operator.facts import Ref
from ssd_operator.verdicts import verdicts

CASES = [
    (Scene(pods=(), deployments=(), spec={"paused": True}), "False", "Paused"),
    (Scene(has_service=False), "False", "EndpointMissing"),
    (
        Scene(has_service=False, planned=Planned(makes=frozenset({Ref("Service", "demo")}))),
        "True",
        "Serving",
    ),
    (
        Scene(has_service=False, facts={"forbidden": {Ref("Service", "demo"): "quota"}}),
        "False",
        "Forbidden",
    ),
    (
        Scene(has_service=False, facts={"rejected": {Ref("Service", "demo"): "no"}}),
        "False",
        "ObjectRefused",
    ),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), CASES)
def test_ready_says_whether_clients_find_a_target(scene: Scene, truth: str, reason: str) -> None:
    (found,) = [verdict for verdict in verdicts(scene.census) if verdict.kind == "Ready"]
    assert (str(found.truth), found.reason) == (truth, reason)
    assert found.message
