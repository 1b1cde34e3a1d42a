"""Ready needs more than a target: clients find it by the Service."""

import pytest
from tests.unit.ssd_operator.scenes import Scene

from ssd_operator.api.spec import Object
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.pod_state import endpoints_of
from ssd_operator.policy.snapshot import Planned
from ssd_operator.status.condition_rules import verdicts

CASES = [
    (Scene(pods=(), deployments=(), spec={"paused": True}), "False", "Paused"),
    (Scene(has_service=False), "False", "EndpointMissing"),
    (Scene(facts={"endpoints": frozenset()}), "False", "EndpointMissing"),
    (Scene(facts={"endpoints": frozenset({"d0", "another"})}), "False", "EndpointMissing"),
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
    (found,) = [verdict for verdict in verdicts(scene.snapshot) if verdict.kind == "Ready"]
    assert (str(found.truth), found.reason) == (truth, reason)
    assert found.message


def endpoint_slice(service: str, *endpoints: tuple[str, bool | None]) -> Object:
    """Endpoints as pods and whether they are ready."""
    return {
        "metadata": {"labels": {"kubernetes.io/service-name": service}},
        "endpoints": [
            {"targetRef": {"name": pod}, "conditions": {} if ready is None else {"ready": ready}}
            for pod, ready in endpoints
        ],
    }


def test_endpoints_are_the_ready_ones_of_the_service_over_all_its_slices() -> None:
    slices = [
        endpoint_slice("demo", ("t0", True), ("t1", False)),
        endpoint_slice("demo", ("t2", None)),
        endpoint_slice("other", ("t3", True)),
        {"metadata": {"labels": {"kubernetes.io/service-name": "demo"}}, "endpoints": None},
    ]
    assert endpoints_of("demo", slices) == {"t0", "t2"}
