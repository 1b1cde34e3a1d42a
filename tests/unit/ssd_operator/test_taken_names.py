"""Ownership: our objects, foreign ones, and those of a former resource of the same name."""

import copy
from typing import Any

import pytest
from tests.unit.ssd_operator.world import (
    DEMO,
    KEY,
    RESOURCE,
    SERVICE,
    TARGET,
    TARGETS,
    World,
    demo,
    settled,
)

from ssd_operator.api.spec import API_VERSION, KIND, Object
from ssd_operator.observe.cluster import ConflictError, Ref
from ssd_operator.observe.pod_state import name_of, to_text

GATED: Object = {"gateway": {"enabled": True}}
SECOND = Ref("Deployment", "demo-target-1")
GONE = {
    SECOND,
    Ref("Deployment", "demo-draft-1"),
    Ref("Service", "demo-draft-1"),
    Ref("PodDisruptionBudget", "demo-target"),
    *(
        Ref(kind, "demo-gateway")
        for kind in ("ServiceAccount", "NetworkPolicy", "Service", "Deployment")
    ),
}
"""Children that one cell without a gateway does not have."""
OTHERS = [{"kind": KIND, "apiVersion": API_VERSION, "name": "x", "uid": "x", "controller": True}]
"""Owner references of another resource's child."""
TAKEN = ("False", "NameTaken")


async def test_a_persons_copies_of_a_child_and_of_a_pod_are_neither_deleted_nor_adopted() -> None:
    world = await settled()
    pod = Ref("Pod", name_of(world.ready_pods("draft")[0]))
    for ref in (SERVICE, pod):
        copied = copy.deepcopy(world[ref])  # as kubectl expose does
        labels = copied["metadata"]["labels"]
        copied["metadata"] = {"namespace": "default", "name": "copy", "labels": labels}
        world.cluster.put(copied)
    await world.come_to_rest(2)
    assert Ref("Service", "copy") in world
    world.remove(RESOURCE)
    assert [name_of(each) for each in world.cluster.of_kind("Pod")] == ["copy"]


async def orphaned(**blocks: Any) -> World:
    """A resource with two cells that was deleted with ``--cascade=orphan``, and made again."""
    world = await settled(target={"replicas": 2}, **GATED)
    for ref in world.children():
        with world.edited(ref) as child:
            child["metadata"]["ownerReferences"] = []
    await world.delete_resource()
    world.cluster.now += 5.0
    world.cluster.create_resource(KEY, demo(**blocks))
    return world


async def test_children_that_a_deleted_resource_left_are_adopted_or_go() -> None:
    world = await orphaned()
    others = (KIND, "Pod", "EndpointSlice")
    left = {ref for _, ref in world.cluster.objects if ref.kind not in others}
    (serving, _) = world.ready_pods("target")
    await world.come_to_rest()
    assert set(world.children()) == left - GONE
    assert left >= GONE
    assert GONE.isdisjoint(ref for _, ref in world.cluster.objects)
    assert world.ready_pods("target") == [serving]
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize(
    "owner",
    [
        OTHERS[0],
        {"kind": "Application", "apiVersion": "apps/v1", "name": "x", "uid": "x"},
    ],
    ids=["another resource", "no controller"],
)
async def test_a_child_that_a_deleted_resource_left_and_another_owner_has_stays(
    owner: Object,
) -> None:
    world = await orphaned()
    with world.edited(SECOND) as found:
        found["metadata"]["ownerReferences"] = [owner]
    theirs = copy.deepcopy(world[SECOND])
    await world.come_to_rest()
    assert world[SECOND] == theirs | {"status": world[SECOND]["status"]}


async def test_a_service_that_a_person_made_for_a_child_is_not_deleted() -> None:
    world = await settled()
    exposed = Ref("Service", TARGET.name)
    # As kubectl expose does: the labels and the name of the Deployment, and no annotation.
    world.take_name(exposed, labels=copy.deepcopy(world[TARGET]["metadata"]["labels"]))
    await world.come_to_rest()
    assert exposed in world


async def test_a_foreign_object_is_not_changed_and_nothing_new_is_made() -> None:
    world = World()
    theirs = world.take_name(SERVICE)
    await world.come_to_rest()
    assert world.children() == []
    assert world[SERVICE] == theirs
    assert world.condition("ResourcesOwned") == TAKEN
    assert world.condition("Ready")[0] == "False"
    world.remove(SERVICE)
    await world.come_to_rest()
    assert world.condition("Ready") == ("True", "Serving")


async def test_a_name_whose_loss_no_watch_reported_ends_one_pass_and_is_not_overwritten() -> None:
    world = await settled()
    with world.edited(SERVICE) as found:
        found["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    world.catch_up()
    num_reported = len(world.cluster.log)
    theirs = world.take_name(SERVICE)
    del world.cluster.log[num_reported:]
    with pytest.raises(ConflictError):
        await world.run_pass()
    assert world[SERVICE] == theirs
    await world.next_pass()
    assert world.condition("ResourcesOwned") == TAKEN


BUDGET = Ref("PodDisruptionBudget", "demo-draft")


@pytest.mark.parametrize("labels", ["kept", "lost"])
async def test_a_foreign_budget_survives_that_the_drafts_of_a_pool_are_scaled(labels: str) -> None:
    world = await settled(draft={"sharing": "Pool", "replicas": 1})
    theirs = world.take_name(BUDGET)
    world.edit_spec(draft={"replicas": 3})
    await world.come_to_rest()
    assert world.condition("ResourcesOwned") == TAKEN
    assert len(world.ready_pods("draft")) == 3
    world.edit_spec(draft={"replicas": 1})
    if labels == "lost":
        with world.edited(Ref("Deployment", "demo-draft")) as found:
            found["metadata"]["labels"] = {}
    await world.come_to_rest()
    assert world[BUDGET] == theirs
    assert len(world.ready_pods("draft")) == 1
    assert world.condition("ResourcesOwned") == ("True", "Owned")


def race(**blocks: Any) -> World:
    """Another resource makes a child of a wanted name, after its name was read."""
    world = World(**blocks)

    def take(verb: str, ref: Ref) -> None:
        if ref == TARGETS and TARGETS not in world:
            world.take_name(TARGETS, ownerReferences=OTHERS)

    world.cluster.meddle = take
    return world


async def test_a_name_that_another_resource_took_meanwhile_is_reported_as_taken() -> None:
    world = race()
    await world.come_to_rest()
    assert world.condition("ResourcesOwned") == TAKEN
    assert world.condition("SpecValid") == ("True", "Valid")
    assert world[TARGETS]["metadata"]["ownerReferences"] == OTHERS


async def test_a_child_that_another_resource_has_taken_over_is_reported_as_taken() -> None:
    world = await settled()
    with world.edited(TARGETS) as found:
        found["metadata"]["ownerReferences"] = OTHERS
    await world.next_pass()
    assert world.condition("ResourcesOwned") == TAKEN


@pytest.mark.parametrize("paused", [False, True])
async def test_a_name_that_is_taken_later_stops_no_running_pod(*, paused: bool) -> None:
    world = await settled()
    world.take_name(SERVICE)
    world.edit_spec(paused=paused, draft={"replicas": 3})
    await world.come_to_rest()
    assert len(world.ready_pods("target")) == 1
    assert len(world.ready_pods("draft")) == (2 if paused else 3)
    assert world.condition("ResourcesOwned") == world.condition("Ready") == TAKEN
    assert "endpoint" not in world.status


@pytest.mark.parametrize("ref", [RESOURCE, TARGET])
async def test_a_pod_that_was_adopted_serves_though_it_is_older_than_one_of_its_makers(
    ref: Ref,
) -> None:
    world = await settled()
    world.cluster.now += 60.0
    with world.edited(ref) as recreated:
        recreated["metadata"]["creationTimestamp"] = to_text(world.cluster.now)
    await world.come_to_rest(2)
    assert world.condition("Ready") == ("True", "Serving")


async def test_children_and_pods_of_a_former_resource_of_the_same_name_do_not_count() -> None:
    world = await settled()
    (pod,) = world.ready_pods("target")
    left = copy.deepcopy([pod, world[SERVICE]])
    await world.delete_resource()
    for each in left:
        world.cluster.put(each)  # the garbage collector has yet to come
    world.cluster.now += 15.0
    world.cluster.create_resource(KEY, DEMO)
    assert await world.next_pass() <= 1.0
    assert world.condition("ResourcesOwned") == ("True", "Owned")
    assert world.condition("Ready")[0] == "False"
    assert world.status["target"]["replicas"] == 0
    world.remove(SERVICE)
    await world.come_to_rest()
    assert world.condition("Ready") == ("True", "Serving")


FRONT, FRONTED = Ref("Deployment", "demo-gateway"), Ref("Service", "demo-gateway")


@pytest.mark.parametrize("lost", [TARGETS, FRONTED])
async def test_a_gateway_whose_service_another_resource_has_is_removed_until_it_is_free(
    lost: Ref,
) -> None:
    world = await settled(**GATED)
    assert FRONT in world
    world.take_name(lost, ownerReferences=OTHERS)
    await world.come_to_rest()
    assert FRONT not in world
    assert world.condition("Ready") == world.condition("GatewayReady") == TAKEN
    assert f"Service {lost.name} belongs to {KIND} x;" in world.message("Ready")
    world.remove(lost)
    await world.come_to_rest()
    assert FRONT in world
    assert world.condition("Ready") == ("True", "Serving")


async def test_a_gateway_is_not_made_in_the_pass_that_loses_a_service() -> None:
    world = race(**GATED)
    await world.come_to_rest()
    assert "demo-gateway" not in world.written("Deployment")
