"""A target that is being deleted on a lost node costs no outage when the resource changes."""

import copy

import pytest
from tests.unit.ssd_operator.world import TARGET, World, settled

from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import (
    LOST_SECONDS,
    cell_of,
    name_of,
    revision_of,
    to_text,
)

GOOD = "localhost/good:2"
FORMER = Ref("Pod", "demo-target-0-former")


def leave_behind(world: World, *, since: float = 3600.0, is_moved: bool = True) -> Object:
    """A pod of the first cell is being deleted on node n-lost, after its grace for this long.

    Returns:
        Its replacement, if it ``is_moved``.
    """
    pod = next(pod for pod in world.ready_pods("target") if cell_of(pod) == 0)
    former = copy.deepcopy(pod)
    former["metadata"] |= {
        "name": FORMER.name,
        "deletionTimestamp": to_text(world.cluster.now - since),
    }
    del former["metadata"]["uid"]
    former["spec"]["nodeName"] = "n-lost"
    former["status"]["conditions"][0]["status"] = "False"
    world.cluster.put(former)
    if not is_moved:
        world.remove(Ref("Pod", name_of(pod)))
    return pod


async def test_a_serving_target_stays_until_the_former_one_is_gone() -> None:
    world = await settled()
    pod = leave_behind(world)
    await world.rounds(2)
    assert world.condition("Progressing") == ("True", "UpToDate")
    world.edit_spec(target={"image": GOOD})
    await world.rounds(5)
    assert world.ready_pods("target") == [pod]
    assert world.written("Deployment") == []
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Progressing") == ("False", "NodeLost")
    message = world.message("Progressing")
    assert f"{FORMER.name} is being deleted, but its node n-lost does not end it" in message
    assert f"{name_of(pod)} stays meanwhile" in message
    assert "kubectl delete node n-lost" in message
    assert "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in message
    assert world.messages("NodeLost") == [message]
    world.remove(FORMER)
    await world.rounds(3)
    (new,) = world.ready_pods("target")
    assert new["spec"]["containers"][0]["image"] == GOOD
    assert world.condition("Progressing") == ("True", "UpToDate")


async def test_a_target_that_still_drains_is_no_lost_one_and_is_waited_for() -> None:
    world = await settled()
    pod = leave_behind(world, since=-300)
    world.edit_spec(target={"image": GOOD})
    await world.rounds(5)
    assert world.ready_pods("target") == [pod]
    assert world.condition("Progressing") == ("True", "RollingOut")
    world.cluster.now += 300 + LOST_SECONDS
    await world.round()
    assert world.condition("Progressing") == ("False", "NodeLost")


async def test_the_other_cells_roll() -> None:
    world = await settled(target={"replicas": 2})
    pod = leave_behind(world)
    world.edit_spec(target={"image": GOOD})
    await world.rounds(8)
    first, second = sorted(world.ready_pods("target"), key=cell_of)
    assert first == pod
    assert second["spec"]["containers"][0]["image"] == GOOD
    assert world.condition("Progressing") == ("False", "NodeLost")


async def test_a_rollout_that_waits_for_a_lost_target_can_be_reverted() -> None:
    world = await settled()
    first = revision_of(world[TARGET])
    leave_behind(world, is_moved=False)
    world.edit_spec(target={"image": GOOD})
    await world.rounds(3)
    assert world.written("Deployment") == [TARGET.name], "there is no target to keep"
    assert world.condition("TargetReady")[0] == "False"
    assert world.condition("Progressing") == ("False", "NodeLost")
    assert "stays" not in world.message("Progressing")
    world.edit_spec(target={"image": ""})
    await world.rounds(3)
    (pod,) = world.ready_pods("target")
    assert revision_of(pod) == first
    assert world.condition("Progressing") == ("True", "UpToDate")


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
async def test_a_former_target_that_has_ended_is_not_waited_for(phase: str) -> None:
    world = await settled()
    leave_behind(world)
    with world.edited(FORMER) as edited:
        edited["status"]["phase"] = phase
    world.edit_spec(target={"image": GOOD})
    await world.rounds(5)
    (new,) = world.ready_pods("target")
    assert new["spec"]["containers"][0]["image"] == GOOD
