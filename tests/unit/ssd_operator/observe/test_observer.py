"""Objects of kinds that a cluster may not serve, or that we may have no right to."""

import pytest
from tests.unit.ssd_operator.world import DEMO, KEY, World, demo

from ssd_operator.api.spec import Object
from ssd_operator.children.kinds import KINDS
from ssd_operator.observe.facts import Ref

KEDA = {"mode": "KEDA", "keda": {"serverAddress": "http://prometheus:9090"}}


@pytest.mark.parametrize(
    ("wanted", "ref"),
    [
        ({"observability": {"podMonitor": True}}, Ref("PodMonitor", "demo")),
        ({"draft": {"autoscaling": KEDA}}, Ref("ScaledObject", "demo-draft")),
    ],
)
async def test_an_object_of_an_optional_kind_is_made_and_deleted(wanted: Object, ref: Ref) -> None:
    world = World(demo(**wanted), kinds=KINDS.keys())
    await world.come_to_rest(6)
    assert ref in dict(world.children())
    world.restart()
    world.cluster.edit_spec(KEY, observability=None, draft={"autoscaling": None})
    await world.come_to_rest(6)
    assert ref not in dict(world.children())


async def test_an_optional_kind_that_is_not_watched_is_reported_and_nothing_else_waits() -> None:
    world = World(demo(observability={"podMonitor": True}, draft={"autoscaling": KEDA}))
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "OptionalAPIMissing")
    assert world.cluster.condition(KEY, "ScalingActive") == ("False", "KEDANotInstalled")
    world.cluster.edit_spec(KEY, **DEMO | {"observability": None})
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")
