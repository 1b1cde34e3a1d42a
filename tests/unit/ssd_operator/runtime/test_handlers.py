"""What kopf hands over of an object, and what it does with one beside that."""

from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import kopf
import pytest

from ssd_operator.runtime.handlers import make_registry, watch_settings

DEPLOYMENT: Any = {
    "metadata": {
        "namespace": "ns",
        "name": "demo-target-0",
        "labels": {"ssd.dev/name": "demo"},
        "managedFields": [{"manager": "ssd-operator", "fieldsV1": {"f:spec": {}}}],
    },
    "spec": {"replicas": 1},
}


async def indexed(registry: kopf.OperatorRegistry, index: str, body: Any) -> Any:
    """What an index keeps of a Deployment."""
    resource = Mock(group="apps", version="v1", plural="deployments")
    handlers: list[Any] = list(registry._indexing.get_all_handlers())
    (function,) = [each.fn for each in handlers if each.id == index]
    return await function(body=kopf.Body(body), resource=resource)


async def test_a_child_is_kept_under_its_resource_with_its_kind() -> None:
    registry = make_registry(Mock(), Mock(), Mock(), Mock())
    found = await indexed(registry, "children", deepcopy(DEPLOYMENT))
    child = found["ns", "demo"]
    assert (child["kind"], child["apiVersion"]) == ("Deployment", "apps/v1")
    assert child["spec"] == DEPLOYMENT["spec"]


async def test_who_wrote_which_field_is_kept_neither_by_us_nor_by_kopf() -> None:
    registry, body = make_registry(Mock(), Mock(), Mock(), Mock()), deepcopy(DEPLOYMENT)
    found = await indexed(registry, "children", body)
    assert found["ns", "demo"]["metadata"].keys() == {"namespace", "name", "labels"}
    assert "managedFields" not in body["metadata"]


@pytest.mark.parametrize("body", [DEPLOYMENT, {"metadata": {}, "spec": {"a": 1}}])
def test_kopf_copies_and_stores_nothing_of_an_object(body: Any) -> None:
    storage = watch_settings().persistence.diffbase_storage
    patch = kopf.Patch()
    assert storage.fetch(body=kopf.Body(body)) is None
    essence = storage.build(body=kopf.Body(body))
    storage.store(body=kopf.Body(body), patch=patch, essence=essence)
    assert (essence, patch) == ({}, {})


@pytest.mark.parametrize(
    ("event", "generation", "called"),
    [
        (None, 1, {"listed", "wake"}),
        ("MODIFIED", 1, {"wake"}),
        ("MODIFIED", 2, {"changed"}),
    ],
)
async def test_an_event_wakes_its_key_and_a_new_listing_is_told(
    event: str | None, generation: int, called: set[str]
) -> None:
    calls = Mock()
    registry = make_registry(Mock(), calls.wake, calls.changed, calls.listed)
    resource = Mock(group="ssd.dev", version="v1alpha1", plural="ssddeployments")
    activities: list[Any] = list(registry._activities.get_all_handlers())
    watching: list[Any] = list(registry._watching.get_all_handlers())
    (begin,) = [each.fn for each in activities if each.id.endswith(".begin")]
    (look,) = [each.fn for each in watching]
    metadata = {"namespace": "ns", "name": "demo", "uid": "u", "resourceVersion": "1"}
    await begin(resources={}, children={})
    before = {"type": "ADDED", "object": {"metadata": metadata | {"generation": 1}}}
    await look(event=before, resource=resource)
    calls.reset_mock()
    now = {"type": event, "object": {"metadata": metadata | {"generation": generation}}}
    await look(event=now, resource=resource)
    assert {name for name, _, _ in calls.method_calls} == called
