"""What the API server does not take: told, no obstacle to the rest, and tried again."""

import copy

import pytest
from tests.unit.ssd_operator.world import KEY, World, settled

from ssd_operator.cluster import ForbiddenError
from ssd_operator.facts import Ref
from ssd_operator.setbacks import RETRY_SECONDS


async def test_what_the_api_server_refuses_is_told_and_not_repeated_until_it_changes() -> None:
    world = World()
    ref = Ref("Deployment", "demo-draft-0")
    world.cluster.refused = {ref: "spec.template: no"}
    await world.come_to_rest(6)
    assert world.cluster.writes.count(("apply", ref)) == 1
    status, reason = world.cluster.condition(KEY, "SpecValid")
    assert (status, reason) == ("False", "PodTemplateInvalid")
    assert len(world.ready_pods("target")) == 1
    world.cluster.refused = {}
    world.cluster.edit_spec(KEY, draft={"image": "localhost/other:1"})
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")
    assert len(world.ready_pods("draft")) == 2


async def test_what_was_refused_is_tried_again_when_the_live_object_is_gone() -> None:
    world = await settled()
    ref = Ref("Service", "demo-draft-0")
    edited = copy.deepcopy(world.cluster.objects["default", ref])
    edited["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    world.cluster.put(edited)
    world.cluster.refused = {ref: "spec.clusterIP: field is immutable"}
    await world.come_to_rest(4)
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "ObjectRefused")
    world.cluster.refused = {}
    world.cluster.remove("default", ref)
    await world.come_to_rest(4)
    assert ("default", ref) in world.cluster.objects
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")


async def test_what_was_refused_is_tried_again_after_a_while() -> None:
    world = World()
    ref = Ref("Service", "demo-draft-0")
    world.cluster.refused = {ref: "denied by a webhook"}
    await world.come_to_rest(6)
    world.cluster.refused = {}
    await world.round()
    assert ("default", ref) not in world.cluster.objects
    world.cluster.now += RETRY_SECONDS
    await world.come_to_rest(4)
    assert ("default", ref) in world.cluster.objects
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")


async def test_what_is_forbidden_is_told_stops_nothing_else_and_is_tried_again() -> None:
    world = World()
    ref = Ref("Deployment", "demo-draft-0")
    world.cluster.forbidden = {ref: "exceeded quota: count/deployments.apps=1"}
    world.see()
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await world.look()
    for _ in range(3):
        await world.round()
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "Forbidden")
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    world.cluster.forbidden = {}
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("True", "Owned")
    assert len(world.ready_pods("draft")) == 2
