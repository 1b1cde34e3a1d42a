"""Deletions that a watch missed, and when the operator is ready."""

import asyncio
from collections.abc import Mapping

import pytest
from tests.unit.ssd_operator.world import DEMO, KEY, RESOURCE, SERVICE, TARGETS, World, settled

from ssd_operator.children.objects import REQUIRED_KINDS
from ssd_operator.observe.cluster import BusyError, ForbiddenError, Key
from ssd_operator.runtime import relist
from ssd_operator.runtime.relist import LISTS_OF_FORBIDDEN, Readiness, Relist

OTHER = ("default", "other")
FORBIDDEN = ForbiddenError("cannot list it")


async def test_nothing_is_made_for_a_resource_whose_deletion_was_missed() -> None:
    world = await settled()
    world.remove(RESOURCE)
    world.watch.list_again()
    world.watch.children.clear()  # their deletions were reported
    world.cluster.now += 2.0
    assert await world.run_pass() is None
    assert await world.run_pass() is None
    assert {verb for verb, _ in world.cluster.writes} <= {"status"}, "which found nothing"
    assert world.engines.followed == {}


async def test_an_invalid_resource_that_is_gone_has_no_event() -> None:
    world = World(accelerator="none")
    world.catch_up()
    world.remove(RESOURCE)
    assert await world.run_pass() is None
    assert world.cluster.events == []


async def test_a_resource_made_again_in_a_gap_is_the_one_that_counts() -> None:
    world = await settled()
    world.remove(RESOURCE)
    world.cluster.create_resource(KEY, DEMO)
    for _ in range(6):
        world.cluster.now += 2.0
        world.watch.list_again()
        await world.try_pass()
        world.controllers.settle()
    assert world.condition("Ready") == ("True", "Serving")


async def test_a_child_whose_deletion_was_missed_is_made_again_after_a_relist() -> None:
    world = await settled()
    world.remove(SERVICE)
    world.watch.list_again()
    await world.run_pass()
    assert SERVICE not in world
    await world.relist.relist()
    assert set(world.woken) == {KEY}
    await world.run_pass()
    assert SERVICE in world


async def test_a_relist_of_what_is_there_changes_nothing() -> None:
    world = await settled()
    before = world.cache.children(KEY)
    await world.relist.relist()
    assert world.woken == []
    assert world.cache.children(KEY) == before


async def test_what_is_newer_than_the_list_stays() -> None:
    world = await settled()
    world.remove(SERVICE)
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
    assert SERVICE in world.cache.children(KEY)


async def test_a_kind_that_cannot_be_listed_loses_no_object() -> None:
    world = await settled()
    world.remove(SERVICE)
    world.watch.list_again()
    world.cluster.failures = [BusyError("503") for _ in REQUIRED_KINDS]
    await world.relist.relist()
    assert SERVICE in world.cache.children(KEY)
    await world.relist.relist()
    assert SERVICE not in world.cache.children(KEY)


async def test_a_namespace_that_cannot_be_listed_hides_no_gap_in_another() -> None:
    world = await settled()
    world.remove(SERVICE)
    world.watch.list_again()
    world.cluster.list_faults = {"gone": FORBIDDEN}
    await relist_of(world, Readiness(), "gone", "default").relist()
    assert set(world.woken) == {KEY}


async def test_only_watched_namespaces_are_listed() -> None:
    world = await settled()
    world.remove(SERVICE)
    world.watch.list_again()
    world.cluster.list_faults = {"default": FORBIDDEN, "": FORBIDDEN}
    readiness = Readiness()
    await relist_of(world, readiness, "one", "two").relist()
    assert (readiness.problem, world.woken) == ("", [])


async def test_a_watch_that_begins_again_is_followed_by_a_relist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relist, "SETTLE_SECONDS", 0.0)
    world = await settled()
    woken, readiness = asyncio.Event(), Readiness()
    lists = Relist(world.cluster, world.cache, lambda key: woken.set(), readiness)
    readiness.finish(KEY, is_good=True)
    world.remove(SERVICE)
    world.watch.list_again()
    running = asyncio.ensure_future(lists.run())
    async with asyncio.timeout(30):
        await woken.wait()
    woken.clear()
    world.remove(TARGETS)
    world.watch.list_again()
    assert readiness.problem == ""
    lists.request()
    async with asyncio.timeout(30):
        await woken.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def relist_of(world: World, readiness: Readiness, *namespaces: str) -> Relist:
    return Relist(world.cluster, world.cache, world.woken.append, readiness, namespaces)


async def test_an_operator_without_resources_is_ready_once_all_kinds_could_be_listed() -> None:
    world, readiness = World(), Readiness()
    world.remove(RESOURCE)
    assert readiness.problem == "starting"
    world.cluster.list_faults = {"NetworkPolicy": ForbiddenError("cannot list NetworkPolicy")}
    await relist_of(world, readiness).relist()
    assert "cannot list NetworkPolicy" in readiness.problem
    world.cluster.list_faults = {}
    await relist_of(world, readiness).relist()
    assert readiness.problem == ""


async def test_an_operator_is_ready_after_a_good_pass_over_one_and_any_over_every_other() -> None:
    world, readiness = World(), Readiness()
    world.cluster.create_resource(OTHER, DEMO)
    await relist_of(world, readiness).relist()
    assert readiness.problem.startswith("2 of 2 resources")
    readiness.finish(KEY, is_good=False)
    assert readiness.problem.startswith("1 of 2 resources")
    readiness.finish(OTHER, is_good=False)
    assert readiness.problem.startswith("every pass over 2 resources has failed")
    readiness.finish(OTHER, is_good=True)
    assert readiness.problem == ""
    readiness.finish(OTHER, is_good=False)
    assert readiness.problem == "", "what was ready once stays so"


async def test_a_resource_that_goes_before_its_first_pass_is_not_waited_for() -> None:
    world, readiness = World(), Readiness()
    await relist_of(world, readiness).relist()
    assert readiness.problem
    world.remove(RESOURCE)
    await relist_of(world, readiness).relist()
    assert readiness.problem == ""


async def test_a_namespace_that_stays_forbidden_is_not_waited_for_beside_another() -> None:
    world, readiness = await settled(), Readiness()
    world.cluster.list_faults = {"gone": FORBIDDEN}
    readiness.finish(KEY, is_good=True)
    lists = relist_of(world, readiness, "default", "gone")
    for _ in range(LISTS_OF_FORBIDDEN):
        assert readiness.problem, "rights may come a moment late"
        await lists.relist()
    assert readiness.problem == ""
