"""Ownership: our objects, foreign ones, and those of a former resource of the same name."""

import copy

import pytest
from tests.unit.ssd_operator.memory_cluster import MemoryCluster
from tests.unit.ssd_operator.world import DEMO, KEY, World, settled

from ssd_operator.api.spec import API_VERSION, KIND, Object
from ssd_operator.observe.cluster import ConflictError
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.pod_state import to_text


async def test_a_persons_copy_of_a_child_is_not_deleted() -> None:
    world = await settled()
    copied = copy.deepcopy(world.cluster.objects["default", Ref("Service", "demo")])
    copied["metadata"] = {
        "namespace": "default",
        "name": "demo-lb",
        "labels": copied["metadata"]["labels"],
    }
    world.cluster.put(copied)  # as kubectl expose does
    await world.come_to_rest(2)
    assert ("default", Ref("Service", "demo-lb")) in world.cluster.objects


async def test_a_foreign_object_is_not_changed_and_nothing_new_is_made() -> None:
    world = World()
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "default", "name": "demo"},
        "spec": {"ports": [{"port": 1}]},
    }
    world.cluster.put(theirs)
    await world.come_to_rest(4)
    assert world.children() == []
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "NameTaken")
    assert world.cluster.condition(KEY, "Ready")[0] == "False"
    world.cluster.remove("default", Ref("Service", "demo"))
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


class Race(MemoryCluster):
    """Another resource makes a child of a wanted name, after its name was read."""

    async def apply(self, wanted: Object, uid: str = "", subresource: str = "") -> Object:
        ref = Ref(wanted["kind"], wanted["metadata"]["name"])
        if ref == Ref("Service", "demo-targets") and ("default", ref) not in self.objects:
            owner = {"kind": KIND, "name": "demo-targets", "uid": "other", "controller": True}
            metadata = {"namespace": "default", "name": ref.name, "ownerReferences": [owner]}
            self.put({"apiVersion": "v1", "kind": "Service", "metadata": metadata})
        return await super().apply(wanted, uid, subresource)


async def test_a_name_that_another_resource_took_meanwhile_is_reported_as_taken() -> None:
    world = World(cluster=Race())
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "NameTaken")
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")
    service = world.cluster.objects["default", Ref("Service", "demo-targets")]
    assert [each["uid"] for each in service["metadata"]["ownerReferences"]] == ["other"]


async def test_a_child_that_another_resource_has_taken_over_is_reported_as_taken() -> None:
    world = World()
    world.catch_up()
    await world.run_pass()  # the first status
    await world.run_pass()
    taken = copy.deepcopy(world.cluster.objects["default", Ref("Service", "demo-targets")])
    owner = {"kind": KIND, "apiVersion": API_VERSION, "name": "demo-targets", "uid": "other"}
    taken["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    world.cluster.put(taken)
    world.catch_up()
    world.cluster.now += 2.0
    await world.run_pass()
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "NameTaken")


async def test_resources_whose_names_differ_by_a_suffix_of_a_child_do_not_share_it() -> None:
    world = await settled()
    other = ("default", "demo-targets")
    world.cluster.create_resource(other, DEMO)
    world.catch_up()
    for _ in range(3):
        await world.reconciler.reconcile(other)
        world.cluster.now += 2.0
    assert world.cluster.condition(other, "ResourcesOwned") == ("False", "NameTaken")
    await world.come_to_rest(2)
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


def release(world: World, component: str, labels: dict[str, str]) -> Ref:
    """A pod whose labels were changed by hand, as its ReplicaSet leaves it."""
    pod = copy.deepcopy(world.ready_pods(component)[0])
    pod["metadata"]["labels"] |= {f"ssd.dev/{name}": value for name, value in labels.items()}
    del pod["metadata"]["ownerReferences"]
    world.cluster.put(pod)
    return Ref("Pod", pod["metadata"]["name"])


@pytest.mark.parametrize(
    "labels", [{"name": "other"}, {"component": "debug"}, {"cell": "9"}, {"cell": "zero"}]
)
@pytest.mark.parametrize("component", ["target", "draft"])
async def test_a_pod_relabelled_by_hand_is_deleted_with_its_resource(
    component: str, labels: dict[str, str]
) -> None:
    world = await settled()
    ref = release(world, component, labels)
    await world.come_to_rest(6)
    assert ("default", ref) in world.cluster.objects, "a person may be inspecting it"
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    assert world.cluster.resource(KEY)["status"]["draft"]["replicas"] == 2
    events = [each for each in world.cluster.events if each.reason == "PodReleased"]
    assert len(events) == 1
    assert ref.name in events[0].message
    world.cluster.remove("default", Ref(KIND, "demo"))
    assert world.cluster.of_kind("Pod") == []


async def test_a_pod_that_a_person_made_is_not_adopted() -> None:
    world = await settled()
    pod = copy.deepcopy(world.ready_pods("draft")[0])
    pod["metadata"] = {
        "namespace": "default",
        "name": "debug",
        "labels": pod["metadata"]["labels"],
    }
    world.cluster.put(pod)
    await world.come_to_rest(2)
    world.cluster.remove("default", Ref(KIND, "demo"))
    assert [each["metadata"]["name"] for each in world.cluster.of_kind("Pod")] == ["debug"]


async def test_a_name_that_is_taken_later_stops_no_running_pod() -> None:
    world = await settled()
    world.cluster.remove("default", Ref("Service", "demo-targets"))
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "default", "name": "demo-targets"},
    }
    world.cluster.put(theirs)
    world.cluster.edit_spec(KEY, draft={"replicas": 3})
    await world.come_to_rest(4)
    assert len(world.ready_pods("target")) == 1
    assert len(world.ready_pods("draft")) == 3
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "NameTaken")


async def test_a_name_that_was_taken_before_the_watch_reported_it_is_not_overwritten() -> None:
    world = await settled()
    ref = Ref("Deployment", "demo-draft-0")
    metadata = {"namespace": "default", "name": ref.name}
    world.cluster.remove("default", ref)
    theirs = world.cluster.put({"apiVersion": "apps/v1", "kind": ref.kind, "metadata": metadata})
    world.cluster.edit_spec(KEY, draft={"image": "localhost/new:1"})
    world.catch_up({KIND})
    with pytest.raises(ConflictError):
        await world.run_pass()
    world.cluster.now += 2.0
    await world.run_pass()
    assert world.cluster.objects["default", ref] == theirs
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "NameTaken")


async def test_children_of_a_former_resource_of_the_same_name_are_waited_for() -> None:
    world = await settled()
    old = copy.deepcopy(world.cluster.objects["default", Ref("Service", "demo")])
    world.cluster.remove("default", Ref("SSDDeployment", "demo"))
    world.catch_up()
    assert await world.run_pass() is None
    world.cluster.put(old)  # the garbage collector has yet to come
    world.cluster.create_resource(KEY, DEMO)
    world.catch_up()
    again_after = await world.run_pass()
    assert again_after is not None
    assert again_after <= 1.0
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("True", "Owned")
    world.cluster.remove("default", Ref("Service", "demo"))
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_a_paused_resource_reports_that_its_name_is_taken() -> None:
    world = await settled()
    ref = Ref("Service", "demo")
    world.cluster.remove("default", ref)
    metadata = {"namespace": "default", "name": "demo"}
    world.cluster.put({"apiVersion": "v1", "kind": "Service", "metadata": metadata})
    world.cluster.edit_spec(KEY, paused=True)
    await world.come_to_rest(2)
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "NameTaken")
    assert world.cluster.condition(KEY, "Ready") == ("False", "NameTaken")
    assert "endpoint" not in world.cluster.resource(KEY)["status"]


@pytest.mark.parametrize("ref", [Ref(KIND, "demo"), Ref("Deployment", "demo-target-0")])
async def test_a_pod_that_was_adopted_serves_though_it_is_older_than_one_of_its_makers(
    ref: Ref,
) -> None:
    world = await settled()
    world.cluster.now += 60.0
    recreated = copy.deepcopy(world.cluster.objects["default", ref])
    recreated["metadata"]["creationTimestamp"] = to_text(world.cluster.now)
    world.cluster.put(recreated)
    await world.come_to_rest(2)
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_pods_of_a_former_resource_of_the_same_name_are_not_counted() -> None:
    world = await settled()
    (pod,) = world.ready_pods("target")
    orphan = copy.deepcopy(pod)
    world.cluster.remove("default", Ref(KIND, "demo"))
    world.cluster.now += 5.0
    world.catch_up()
    await world.run_pass()
    world.cluster.put(orphan)  # the garbage collector has yet to come
    world.cluster.now += 5.0
    world.cluster.create_resource(KEY, DEMO)
    world.catch_up()
    await world.run_pass()
    assert world.cluster.resource(KEY)["status"]["target"]["replicas"] == 0
    assert world.cluster.condition(KEY, "Ready")[0] == "False"
