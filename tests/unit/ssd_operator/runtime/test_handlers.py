"""What kopf hands over of an object, and what it does with one beside that."""

from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import kopf
import pytest

from ssd_operator.children.objects import REQUIRED_KINDS
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
    registry = make_registry(REQUIRED_KINDS, Mock(), Mock(), Mock())
    found = await indexed(registry, "children", deepcopy(DEPLOYMENT))
    child = found["ns", "demo"]
    assert (child["kind"], child["apiVersion"]) == ("Deployment", "apps/v1")
    assert child["spec"] == DEPLOYMENT["spec"]


async def test_who_wrote_which_field_is_kept_neither_by_us_nor_by_kopf() -> None:
    registry, body = make_registry(REQUIRED_KINDS, Mock(), Mock(), Mock()), deepcopy(DEPLOYMENT)
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
    ("events", "is_changed"),
    [
        ([("ADDED", 1), ("MODIFIED", 1)], False),
        ([("ADDED", 1), ("MODIFIED", 2)], True),
        ([("ADDED", 1), ("DELETED", 2)], False),
        ([("ADDED", 1), ("DELETED", 1), ("ADDED", 2)], False),
        ([(None, 1)], False),
    ],
)
async def test_an_event_asks_for_a_pass_and_only_a_new_generation_is_a_change(
    events: list[tuple[str | None, int]], *, is_changed: bool
) -> None:
    calls = Mock()
    registry = make_registry(REQUIRED_KINDS, calls.start, calls.wake, calls.relist)
    resource = Mock(group="ssd.dev", version="v1alpha1", plural="ssddeployments")
    activities: list[Any] = list(registry._activities.get_all_handlers())
    watching: list[Any] = list(registry._watching.get_all_handlers())
    (begin,) = [each.fn for each in activities if each.id.endswith(".begin")]
    (handle,) = [each.fn for each in watching]
    metadata = {"namespace": "ns", "name": "demo", "uid": "u", "resourceVersion": "1"}
    await begin(resources={}, children={})
    for event, generation in events:
        body = {"metadata": metadata | {"generation": generation}}
        await handle(event={"type": event, "object": body}, resource=resource)
    calls.wake.assert_called_with(("ns", "demo"), is_changed)
    assert calls.wake.call_count == len(events)
    assert calls.relist.called is (events[0][0] is None)
