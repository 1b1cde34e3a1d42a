"""Resources that the schema accepts and the operator cannot read keep their last valid spec."""

from typing import Any

from tests.unit.ssd_operator.world import DEMO, KEY, World, settled

from ssd_operator.observe.facts import Ref

RESERVED = {"podTemplate": {"env": [{"name": "SSD_TARGET_POD_NAME", "value": "x"}]}}


async def invalid(**blocks: Any) -> World:
    """A resource that served, and was then edited."""
    world = await settled()
    world.cluster.edit_spec(KEY, target=RESERVED, **blocks)
    await world.come_to_rest(4)
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "ReservedEnv")
    return world


async def test_an_invalid_resource_keeps_what_it_has() -> None:
    world = await invalid()
    assert world.cluster.condition(KEY, "Ready")[0] == "True"
    assert {verb for verb, _ in world.cluster.writes} == {"status"}


async def test_the_status_of_an_invalid_resource_stays_current() -> None:
    world = await invalid()
    (pod,) = world.ready_pods("target")
    world.controllers.unwell.add(pod["metadata"]["name"])
    world.controllers.kill(pod)
    await world.come_to_rest(4)
    assert world.cluster.condition(KEY, "Ready")[0] == "False"
    status = world.cluster.resource(KEY)["status"]
    assert status["target"]["readyReplicas"] == 0
    assert status["observedGeneration"] == world.cluster.resource(KEY)["metadata"]["generation"]
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "ReservedEnv")


async def test_a_child_of_an_invalid_resource_is_made_again() -> None:
    world = await invalid()
    world.cluster.remove("default", Ref("Service", "demo"))
    await world.come_to_rest(4)
    assert ("default", Ref("Service", "demo")) in world.cluster.objects


async def test_an_invalid_resource_is_still_scaled() -> None:
    world = await invalid(draft={"replicas": 1})
    assert len(world.ready_pods("draft")) == 1
    world.cluster.edit_spec(KEY, draft={"replicas": 3})
    await world.come_to_rest(6)
    assert len(world.ready_pods("draft")) == 3


async def test_an_invalid_resource_is_still_paused() -> None:
    world = await invalid(paused=True)
    world.cluster.remove("default", Ref("Service", "demo"))
    await world.come_to_rest(4)
    assert ("default", Ref("Service", "demo")) not in world.cluster.objects


async def test_a_spec_that_the_schema_forbids_changes_nothing() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, paused=True, draft={"replicas": -1})
    await world.come_to_rest(4)
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "SpecInvalid")
    assert len(world.ready_pods("draft")) == 2


async def test_a_corrected_resource_is_carried_out() -> None:
    world = await invalid()
    world.cluster.edit_spec(KEY, target={"podTemplate": {"env": []}, "image": "localhost/new:1"})
    await world.come_to_rest(8)
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")
    (pod,) = world.deployment("demo-target-0")["spec"]["template"]["spec"]["containers"]
    assert pod["image"] == "localhost/new:1"


async def test_a_resource_that_could_never_be_read_has_no_children_and_a_reason() -> None:
    world = World({**DEMO, "target": {**DEMO["target"], **RESERVED}})
    await world.come_to_rest(4)
    assert world.cluster.condition(KEY, "Ready") == ("False", "ReservedEnv")
    assert world.children() == []


async def test_conditions_of_a_resource_that_this_operator_never_read_are_unknown() -> None:
    world = await invalid()
    world.restart()
    (pod,) = world.ready_pods("target")
    world.controllers.unwell.add(pod["metadata"]["name"])
    world.controllers.kill(pod)
    await world.come_to_rest(4)
    for kind in ("Ready", "TargetReady", "ResourcesOwned"):
        assert world.cluster.condition(KEY, kind) == ("Unknown", "ReservedEnv")
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "ReservedEnv")
