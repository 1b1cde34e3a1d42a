"""Objects of kinds that a cluster may not serve, or that we may have no right to."""

from tests.unit.ssd_operator.world import DEMO, KEY, World, demo, settled

from ssd_operator.observe.facts import Ref
from ssd_operator.observe.observer import FORBIDDEN_SECONDS, OPTIONAL_SECONDS


async def test_an_absent_optional_api_is_reported_and_costs_no_call() -> None:
    world = World(DEMO | {"observability": {"podMonitor": True}})
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "OptionalAPIMissing")
    world = World(DEMO | {"observability": {"podMonitor": True}})
    world.cluster.optional = frozenset({"PodMonitor"})
    await world.come_to_rest(6)
    assert Ref("PodMonitor", "demo") in dict(world.children())
    world.cluster.edit_spec(KEY, observability={"podMonitor": False})
    await world.come_to_rest(6)
    assert Ref("PodMonitor", "demo") not in dict(world.children())


async def test_a_kind_that_came_later_and_is_not_wanted_needs_no_right() -> None:
    world = await settled()
    world.cluster.unreadable = {"ScaledObject", "PodMonitor"}
    world.cluster.optional = frozenset(world.cluster.unreadable)
    world.cluster.now += 2 * OPTIONAL_SECONDS
    world.cluster.remove("default", Ref("Service", "demo"))
    world.catch_up()
    await world.run_pass()
    assert ("default", Ref("Service", "demo")) in world.cluster.objects
    world.restart()
    world.catch_up()
    await world.run_pass()
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")


async def test_a_missing_right_on_a_kind_that_is_wanted_is_reported_until_it_is_given() -> None:
    autoscaling = {"mode": "KEDA", "keda": {"serverAddress": "http://prometheus:9090"}}
    world = World(demo(observability={"podMonitor": True}, draft={"autoscaling": autoscaling}))
    world.cluster.optional = frozenset({"ScaledObject", "PodMonitor"})
    world.cluster.unreadable = {"ScaledObject", "PodMonitor"}
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "OptionalAPIMissing")
    assert world.cluster.condition(KEY, "ScalingActive") == ("False", "OptionalAPIMissing")
    world.cluster.unreadable = set()
    world.cluster.now += FORBIDDEN_SECONDS
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")
    assert Ref("PodMonitor", "demo") in dict(world.children())
