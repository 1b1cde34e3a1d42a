"""Objects of kinds that a cluster may not serve, or that we may have no right to."""

import pytest
from tests.unit.ssd_operator.world import World

from ssd_operator.api.spec import Object
from ssd_operator.children.objects import KINDS
from ssd_operator.observe.cluster import Ref

AUTOSCALING = {"mode": "KEDA", "keda": {"serverAddress": "http://prometheus:9090"}}
SCALED: Object = {"draft": {"autoscaling": AUTOSCALING}}
MONITORED: Object = {"observability": {"podMonitor": True}}
NEITHER = {"observability": None, "draft": {"autoscaling": None}}


@pytest.mark.parametrize(
    ("wanted", "ref"),
    [(MONITORED, Ref("PodMonitor", "demo")), (SCALED, Ref("ScaledObject", "demo-draft"))],
)
async def test_an_object_of_an_optional_kind_is_made_and_deleted(wanted: Object, ref: Ref) -> None:
    world = World(**wanted)
    world.kinds = KINDS.keys()
    world.restart()
    await world.come_to_rest()
    assert ref in world.children()
    world.restart()
    world.edit_spec(**NEITHER)
    await world.come_to_rest()
    assert ref not in world.children()


async def test_an_optional_kind_that_is_not_watched_is_reported_and_nothing_else_waits() -> None:
    world = World(**MONITORED, **SCALED)
    await world.come_to_rest()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("SpecValid") == ("False", "OptionalAPIMissing")
    assert world.condition("ScalingActive") == ("False", "KEDANotInstalled")
    assert "the cluster does not serve PodMonitor" in world.message("SpecValid")
    assert world.message("ScalingActive").startswith("The cluster does not serve ScaledObject")
    world.edit_spec(**NEITHER)
    await world.come_to_rest()
    assert world.condition("SpecValid") == ("True", "Valid")
