"""Ready needs a target and the Service by which clients reach it."""

import pytest
from tests.unit.ssd_operator.scenes import Scene, refused

from ssd_operator.api.spec import Object
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.pod_state import endpoints_of
from ssd_operator.policy.apply_failures import Results
from ssd_operator.status.condition_rules import conditions

SERVICE = Ref("Service", "demo")
CASES = [
    (Scene(pods=(), deployments=(), spec={"paused": True}), "False", "Paused"),
    (Scene(has_service=False), "False", "EndpointMissing"),
    (Scene(facts={"endpoints": frozenset()}), "False", "EndpointMissing"),
    (Scene(facts={"endpoints": frozenset({"d0", "another"})}), "False", "EndpointMissing"),
    (
        Scene(has_service=False, results=Results(applied={SERVICE})),
        "True",
        "Serving",
    ),
    (
        Scene(has_service=False, results=Results(forbidden={SERVICE: "quota"})),
        "False",
        "Forbidden",
    ),
    (
        Scene(has_service=False, results=refused(SERVICE)),
        "False",
        "ObjectRefused",
    ),
]


@pytest.mark.parametrize(("scene", "truth", "reason"), CASES)
def test_ready_is_true_if_clients_reach_a_target(scene: Scene, truth: str, reason: str) -> None:
    found = conditions(scene.result)["Ready"]
    assert (str(found.truth), found.reason) == (truth, reason)
    assert found.message


def endpoint_slice(service: str, *endpoints: tuple[str, bool | None]) -> Object:
    """A slice with these pods, and whether they are ready."""
    return {
        "metadata": {"labels": {"kubernetes.io/service-name": service}},
        "endpoints": [
            {"targetRef": {"name": pod}, "conditions": {} if ready is None else {"ready": ready}}
            for pod, ready in endpoints
        ],
    }


def test_endpoints_are_the_ready_pods_of_all_slices_of_the_service() -> None:
    slices = [
        endpoint_slice("demo", ("t0", True), ("t1", False)),
        endpoint_slice("demo", ("t2", None)),
        endpoint_slice("other", ("t3", True)),
        {"metadata": {"labels": {"kubernetes.io/service-name": "demo"}}, "endpoints": None},
    ]
    assert endpoints_of("demo", slices) == {"t0", "t2"}
