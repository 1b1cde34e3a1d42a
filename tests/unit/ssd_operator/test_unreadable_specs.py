"""Resources that the operator cannot read keep their last valid spec."""

from typing import Any

from tests.unit.ssd_operator.world import RESOURCE, SERVICE, TARGET, World, settled

from ssd_operator.observe.cluster import RefusedError

BAD = {"drainSeconds": -1}
INVALID = ("False", "SpecInvalid")


async def invalid(**blocks: Any) -> World:
    """A resource that served, and was then edited."""
    world = await settled()
    world.edit_spec(target=BAD, **blocks)
    await world.come_to_rest()
    assert world.condition("SpecValid") == INVALID
    return world


async def test_an_invalid_resource_keeps_what_it_has_and_is_repaired() -> None:
    world = await invalid()
    assert world.condition("Ready")[0] == "True"
    assert {verb for verb, _ in world.cluster.writes} == {"status"}
    world.remove(SERVICE)
    await world.come_to_rest()
    assert SERVICE in world


async def test_the_status_of_an_invalid_resource_stays_current() -> None:
    world = await invalid()
    world.controllers.make_unready(world.ready_pods("target")[0])
    await world.come_to_rest()
    assert world.condition("Ready")[0] == "False"
    assert world.status["target"]["readyReplicas"] == 0
    assert world.status["observedGeneration"] == world[RESOURCE]["metadata"]["generation"]
    assert world.condition("SpecValid") == INVALID
    world.restart()  # it has never read the resource
    await world.come_to_rest()
    for kind in ("Ready", "TargetReady", "ResourcesOwned"):
        assert world.condition(kind) == ("Unknown", "SpecInvalid")
    assert world.condition("SpecValid") == INVALID


async def test_a_resource_that_cannot_be_read_is_scaled() -> None:
    world = await invalid(draft={"replicas": 1})
    assert len(world.ready_pods("draft")) == 1


async def test_a_resource_that_cannot_be_read_is_paused_and_continues() -> None:
    world = await invalid(paused=True)
    world.remove(SERVICE)
    await world.come_to_rest()
    assert SERVICE not in world
    world.edit_spec(paused=False)
    await world.come_to_rest()
    assert SERVICE in world
    assert world.condition("SpecValid") == INVALID


async def test_an_invalid_number_of_drafts_is_ignored() -> None:
    world = await invalid(draft={"replicas": -1})
    assert len(world.ready_pods("draft")) == 2


async def test_a_corrected_resource_is_carried_out() -> None:
    world = await invalid()
    world.edit_spec(target={"drainSeconds": 60, "image": "localhost/new:1"})
    await world.come_to_rest()
    assert world.condition("SpecValid") == ("True", "Valid")
    (container,) = world[TARGET]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "localhost/new:1"


async def test_a_resource_that_could_never_be_read_has_no_children_and_a_reason() -> None:
    world = World(target=BAD)
    await world.come_to_rest()
    assert world.condition("Ready") == INVALID
    assert world.children() == []


async def test_a_negative_amount_is_reported_as_the_api_server_refuses_it() -> None:
    world = await settled()
    world.cluster.write_faults = {"Deployment": RefusedError("requests[cpu]: must be positive")}
    world.edit_spec(target={"resources": {"requests": {"cpu": -1}}})
    await world.come_to_rest()
    assert world.condition("SpecValid") == ("False", "PodTemplateInvalid")
    assert world.condition("Ready")[0] == "True"
