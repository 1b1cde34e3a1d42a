"""Targets that hang while their Deployment is complete, and pods that the kubelet rejects."""

import pytest
from tests.unit.ssd_operator.world import TARGET, World, settled

from ssd_operator.api.spec import Object
from ssd_operator.children.manifests import PROGRESS_SECONDS
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import condition_of, name_of, revision_of

STARTUP_SECONDS = 300
LONGEST = STARTUP_SECONDS + PROGRESS_SECONDS
OVERDUE = ("False", "ProgressDeadlineExceeded")
REJECTED: Object = {
    "phase": "Failed",
    "reason": "UnexpectedAdmissionError",
    "message": "Allocate failed due to no healthy devices present.",
}
EVICTED: Object = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": "The node was low on memory.",
    "containerStatuses": [{"name": "target", "state": {"terminated": {"exitCode": 137}}}],
}


async def serving() -> World:
    return await settled(target={"startupTimeoutSeconds": STARTUP_SECONDS})


def target_pod(world: World) -> Object:
    (pod,) = world.ready_pods("target")
    return pod


async def evict(world: World) -> None:
    """The target is replaced by a pod that does not become ready."""
    pod = target_pod(world)
    world.controllers.broken.add(revision_of(pod))
    world.remove(Ref("Pod", name_of(pod)))
    await world.rounds(3)


async def recover(world: World) -> None:
    world.controllers.broken.clear()
    await world.rounds(3)


def fail(world: World, pod: Object, name: str, status: Object) -> None:
    """A pod like this one has failed for good."""
    metadata = {key: value for key, value in pod["metadata"].items() if key != "uid"}
    metadata = {key: value for key, value in metadata.items() if key != "creationTimestamp"}
    world.cluster.put({**pod, "metadata": metadata | {"name": name}, "status": status})


async def test_a_replaced_target_that_hangs_makes_progressing_false_after_its_time() -> None:
    world = await serving()
    await evict(world)
    assert condition_of(world[TARGET], "Progressing")["reason"] == "NewReplicaSetAvailable"
    assert world.condition("Progressing") == ("True", "Scaling")
    world.cluster.events.clear()
    again_after = await world.next_pass()
    assert LONGEST - 60 < again_after <= LONGEST
    world.cluster.now += again_after - 3
    await world.next_pass()
    assert world.condition("Progressing") == ("True", "Scaling")
    await world.next_pass()
    assert world.condition("Progressing") == OVERDUE
    assert f"not all been ready for {LONGEST} s" in world.message("Progressing")
    assert "0 of 1 targets are ready" in world.message("Progressing")
    await world.rounds(3)
    assert world.reasons == ["ProgressDeadlineExceeded"]
    await recover(world)
    assert world.condition("Progressing") == ("True", "UpToDate")


async def test_the_rollout_that_repairs_a_target_has_its_own_time() -> None:
    world = await serving()
    await evict(world)
    world.cluster.now += LONGEST
    await world.rounds(2)
    assert world.condition("Progressing") == OVERDUE
    world.edit_spec(target={"image": "localhost/good:2"})
    await world.next_pass()
    world.controllers.step()
    await world.next_pass()
    assert world.condition("Progressing") == ("True", "RollingOut")


async def test_a_target_of_a_resource_that_began_paused_has_its_time() -> None:
    world = World(paused=True)
    await world.rounds(2)
    world.cluster.now += 2 * 3600
    await world.round()
    world.cluster.events.clear()
    world.edit_spec(paused=False)
    await world.next_pass()
    assert world.condition("Progressing") == ("True", "Scaling")
    assert "ProgressDeadlineExceeded" not in world.reasons


async def test_a_pod_that_the_kubelet_rejects_is_quoted() -> None:
    world = await serving()
    pod = target_pod(world)
    await evict(world)
    fail(world, pod, "demo-target-0-first", EVICTED)
    world.cluster.now += 60
    fail(world, pod, "demo-target-0-second", REJECTED)
    await world.rounds(2)
    quoted = "cell 0 failed: UnexpectedAdmissionError: Allocate failed due to no healthy devices"
    assert world.condition("TargetReady") == ("False", "PodFailed")
    assert world.messages("PodFailed") == [world.message("TargetReady")]
    assert quoted in world.message("TargetReady")
    world.cluster.now += LONGEST
    await world.rounds(2)
    assert world.condition("Progressing") == OVERDUE
    assert quoted in world.message("Progressing")


async def test_a_draft_that_the_kubelet_rejects_is_quoted_until_its_replacement_starts() -> None:
    world = await settled(draft={"replicas": 2})
    pod, _ = world.ready_pods("draft")
    world.controllers.broken.add(revision_of(pod))
    world.remove(Ref("Pod", name_of(pod)))
    await world.rounds(3)
    assert world.condition("DraftReady") == ("False", "Loading")
    fail(world, pod, "demo-draft-0-first", REJECTED)
    await world.rounds(2)
    assert world.condition("DraftReady") == ("False", "PodFailed")
    assert "the drafts failed: UnexpectedAdmissionError: Allocate" in world.message("DraftReady")
    (starting,) = (
        each
        for each in world.cluster.of_kind("Pod")
        if revision_of(each) == revision_of(pod)
        and each["status"]["phase"] != "Failed"
        and name_of(each) not in map(name_of, world.ready_pods("draft"))
    )
    with world.edited(Ref("Pod", name_of(starting))) as edited:
        edited["status"]["containerStatuses"] = [{"state": {"running": {}}}]
    await world.round()
    assert world.condition("DraftReady") == ("False", "Loading")


@pytest.mark.parametrize("seconds", [0, 600])
async def test_a_pod_that_failed_after_it_had_served_is_not_the_cause(seconds: float) -> None:
    world = await serving()
    world.cluster.now += seconds
    pod = target_pod(world)
    world.cluster.put({**pod, "status": EVICTED})
    world.controllers.broken.add(revision_of(pod))
    await world.rounds(3)
    assert world.condition("TargetReady") == ("False", "Loading")


async def test_a_pod_that_was_rejected_is_not_the_cause_once_another_one_starts() -> None:
    world = await serving()
    pod = target_pod(world)
    await evict(world)
    fail(world, pod, "demo-target-0-first", REJECTED)
    await world.round()
    assert world.condition("TargetReady") == ("False", "PodFailed")
    (starting,) = (
        each
        for each in world.cluster.of_kind("Pod")
        if revision_of(each) == revision_of(pod) and each["status"]["phase"] != "Failed"
    )
    with world.edited(Ref("Pod", name_of(starting))) as edited:
        edited["status"]["containerStatuses"] = [{"state": {"running": {}}}]
    await world.round()
    assert world.condition("TargetReady") == ("False", "Loading")


async def test_a_return_to_an_earlier_revision_has_rolled_out_once_its_target_is_ready() -> None:
    world = await serving()
    first = revision_of(world[TARGET])
    world.edit_spec(target={"image": "localhost/good:2"})
    await world.come_to_rest()
    world.cluster.events.clear()
    world.controllers.broken.add(first)
    world.edit_spec(target={"image": ""})
    await world.rounds(6)
    assert revision_of(world[TARGET]) == first
    assert condition_of(world[TARGET], "Progressing")["reason"] == "NewReplicaSetAvailable"
    assert world.condition("Progressing") == ("True", "RollingOut")
    assert world.messages("RolledOut") == []
    await recover(world)
    assert world.condition("Progressing") == ("True", "UpToDate")
    assert len(world.messages("RolledOut")) == 1
