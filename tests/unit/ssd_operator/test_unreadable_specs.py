"""Resources that the operator cannot read keep their children."""

from tests.unit.ssd_operator.world import RESOURCE, TARGET, World, settled

from ssd_operator.observe.cluster import RefusedError

BAD = {"drainSeconds": -1}
INVALID = ("False", "SpecInvalid")


async def test_a_resource_that_cannot_be_read_keeps_what_it_has_until_it_is_corrected() -> None:
    world = await settled()
    world.edit_spec(target=BAD, draft={"replicas": 1})
    await world.come_to_rest()
    assert {verb for verb, _ in world.cluster.writes} == {"status"}
    assert (len(world.ready_pods("target")), len(world.ready_pods("draft"))) == (1, 2)
    for kind in ("Ready", "TargetReady", "ResourcesOwned"):
        assert world.condition(kind) == ("Unknown", "SpecInvalid")
    assert world.condition("SpecValid") == INVALID
    assert world.status["observedGeneration"] == world[RESOURCE]["metadata"]["generation"]
    world.edit_spec(target={"drainSeconds": 60, "image": "localhost/new:1"})
    await world.come_to_rest()
    assert world.condition("SpecValid") == ("True", "Valid")
    (container,) = world[TARGET]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "localhost/new:1"
    assert len(world.ready_pods("draft")) == 1


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
