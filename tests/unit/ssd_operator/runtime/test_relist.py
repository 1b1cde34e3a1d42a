"""Deletions that a watch missed, and when the operator is ready."""

import asyncio
from collections.abc import Mapping

import pytest
from tests.unit.ssd_operator.world import DEMO, KEY, World, settled

from ssd_operator.api.spec import KIND
from ssd_operator.children.kinds import REQUIRED_KINDS
from ssd_operator.observe.cluster import BusyError, Key
from ssd_operator.observe.facts import Ref
from ssd_operator.runtime import relist
from ssd_operator.runtime.relist import LISTS_OF_FORBIDDEN, Readiness, Relist

RESOURCE = Ref(KIND, "demo")
KEY_ADDRESS = ("default", RESOURCE)


async def test_nothing_is_made_for_a_resource_whose_deletion_was_missed() -> None:
    world = await settled()
    world.cluster.remove("default", RESOURCE)
    world.watch.list_again()
    world.watch.children.clear()  # their deletions were reported
    world.cluster.now += 2.0
    assert await world.run_pass() is None
    assert await world.run_pass() is None
    assert {verb for verb, _ in world.cluster.writes} <= {"status"}, "which found nothing"
    assert world.engines.followed == {}


async def test_an_invalid_resource_that_is_gone_has_no_event() -> None:
    world = World({"accelerator": "none"})
    world.catch_up()
    world.cluster.remove("default", RESOURCE)
    assert await world.run_pass() is None
    assert world.cluster.events == []


async def test_a_resource_made_again_in_a_gap_is_the_one_that_counts() -> None:
    world = await settled()
    world.cluster.remove("default", RESOURCE)
    world.cluster.create_resource(KEY, DEMO)
    world.relist_watch()
    for _ in range(6):
        world.cluster.now += 2.0
        world.relist_watch()
        await world.try_pass()
        world.controllers.settle()
    uid = world.cluster.resource(KEY)["metadata"]["uid"]
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    owners = {
        owner["uid"]
        for _, child in world.children()
        for owner in child["metadata"]["ownerReferences"]
    }
    assert owners == {uid}


async def test_a_child_whose_deletion_was_missed_is_made_again_after_a_relist() -> None:
    world = await settled()
    service = Ref("Service", "demo")
    world.cluster.remove("default", service)
    world.relist_watch()
    await world.run_pass()
    assert ("default", service) not in world.cluster.objects
    await world.relist.relist()
    assert set(world.woken) == {KEY}
    await world.run_pass()
    assert ("default", service) in world.cluster.objects


async def test_a_pod_whose_deletion_was_missed_does_not_block_a_scale_down() -> None:
    world = await settled()
    pod = world.ready_pods("draft")[0]
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    world.cluster.remove("default", Ref("Pod", pod["metadata"]["name"]))
    for _ in range(4):
        world.relist_watch()
        world.cluster.now += 2.0
        await world.run_pass()
        world.engines.finish()
    await world.relist.relist()
    for _ in range(6):
        world.cluster.now += 2.0
        world.relist_watch()
        await world.run_pass()
        world.engines.finish()
        world.controllers.settle()
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 1


async def test_a_relist_of_what_is_there_changes_nothing() -> None:
    world = await settled()
    before = world.cache.children(KEY)
    await world.relist.relist()
    assert world.woken == []
    assert world.cache.children(KEY) == before


async def test_what_is_newer_than_the_list_stays() -> None:
    world = await settled()
    world.cluster.remove("default", Ref("Service", "demo"))
    world.catch_up()
    listed = world.cluster.uids

    async def uids(kind: str, namespace: str) -> Mapping[str, Key]:
        found = await listed(kind, namespace)
        if kind == "Service":  # made and seen while the list is on its way
            await world.run_pass()
            world.catch_up()
        return found

    world.cluster.uids = uids  # type: ignore[method-assign]
    await world.relist.relist()
    assert Ref("Service", "demo") in world.cache.children(KEY)


async def test_a_kind_that_cannot_be_listed_loses_no_object() -> None:
    world = await settled()
    world.cluster.remove("default", Ref("Service", "demo"))
    world.relist_watch()
    world.cluster.failures = [BusyError("503") for _ in REQUIRED_KINDS]
    await world.relist.relist()
    assert Ref("Service", "demo") in world.cache.children(KEY)
    await world.relist.relist()
    assert Ref("Service", "demo") not in world.cache.children(KEY)


async def test_only_watched_namespaces_are_listed() -> None:
    world = await settled()
    listed: list[str] = []

    async def uids(kind: str, namespace: str) -> Mapping[str, Key]:
        listed.append(namespace)
        return {}

    world.cluster.uids = uids  # type: ignore[method-assign]
    await relist_of(world, "one", "two").relist()
    assert set(listed) == {"one", "two"}


async def test_a_watch_that_begins_again_is_followed_by_a_relist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relist, "SETTLE_SECONDS", 0.0)
    world = await settled()
    world.cluster.remove("default", Ref("Service", "demo"))
    world.relist_watch()
    woken = asyncio.Event()
    readiness = Readiness()
    lists = Relist(world.cluster, world.cache, lambda key: woken.set(), readiness)
    readiness.finish(KEY, is_good=True)
    running = asyncio.ensure_future(lists.run())
    async with asyncio.timeout(30):
        await woken.wait()
    woken.clear()
    world.cluster.remove("default", Ref("Service", "demo-targets"))
    world.relist_watch()
    assert readiness.problem == ""
    lists.request()
    async with asyncio.timeout(30):
        await woken.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_namespace_that_cannot_be_listed_hides_no_gap_in_another() -> None:
    world = await settled()
    ref = Ref("Service", "demo")
    world.cluster.remove("default", ref)
    world.relist_watch()
    world.cluster.forbidden_namespaces = {"gone"}
    await relist_of(world, "gone", "default").relist()
    assert set(world.woken) == {KEY}


def relist_of(world: World, *namespaces: str, readiness: Readiness | None = None) -> Relist:
    readiness = readiness or Readiness()
    return Relist(world.cluster, world.cache, world.woken.append, readiness, namespaces)


OTHER = ("default", "other")


async def test_an_operator_without_resources_is_ready_once_all_kinds_could_be_listed() -> None:
    world, readiness = World(), Readiness()
    world.cluster.remove(*KEY_ADDRESS)
    assert readiness.problem == "starting"
    world.cluster.unreadable = {"NetworkPolicy"}
    await relist_of(world, readiness=readiness).relist()
    assert "cannot list NetworkPolicy" in readiness.problem
    world.cluster.unreadable = set()
    await relist_of(world, readiness=readiness).relist()
    assert readiness.problem == ""


async def test_an_operator_is_ready_after_a_pass_over_every_resource() -> None:
    world, readiness = World(), Readiness()
    world.cluster.create_resource(OTHER, DEMO)
    await relist_of(world, readiness=readiness).relist()
    assert readiness.problem.startswith("2 of 2 resources")
    readiness.finish(KEY, is_good=False)
    assert readiness.problem.startswith("1 of 2 resources")
    readiness.finish(OTHER, is_good=True)
    assert readiness.problem == ""
    readiness.finish(OTHER, is_good=False)
    assert readiness.problem == "", "what was ready once stays so"


async def test_an_operator_whose_every_pass_fails_is_not_ready() -> None:
    world, readiness = World(), Readiness()
    await relist_of(world, readiness=readiness).relist()
    readiness.finish(KEY, is_good=False)
    assert readiness.problem.startswith("every pass over 1 resources has failed")
    readiness.finish(KEY, is_good=True)
    assert readiness.problem == ""


async def test_a_resource_that_goes_before_its_first_pass_is_not_waited_for() -> None:
    world, readiness = World(), Readiness()
    await relist_of(world, readiness=readiness).relist()
    assert readiness.problem
    world.cluster.remove(*KEY_ADDRESS)
    await relist_of(world, readiness=readiness).relist()
    assert readiness.problem == ""


async def test_a_namespace_that_stays_forbidden_is_not_waited_for_beside_another() -> None:
    world, readiness = await settled(), Readiness()
    world.cluster.forbidden_namespaces = {"gone"}
    readiness.finish(KEY, is_good=True)
    lists = relist_of(world, "default", "gone", readiness=readiness)
    for _ in range(LISTS_OF_FORBIDDEN):
        assert readiness.problem, "rights may come a moment late"
        await lists.relist()
    assert readiness.problem == ""
