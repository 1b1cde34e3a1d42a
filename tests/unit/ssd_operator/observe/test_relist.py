"""What was deleted while a watch had a gap: nobody tells, and nothing may be built on it."""

import asyncio

import pytest
from tests.unit.ssd_operator.world import DEMO, KEY, World

from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe import relist as roll_call
from ssd_operator.observe.cluster import WATCHED_KINDS, BusyError
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.relist import RollCall

RESOURCE = Ref(KIND, "demo")


async def settled(spec: Object = DEMO) -> World:
    world = World(spec)
    await world.come_to_rest(8)
    world.cluster.writes.clear()
    return world


async def test_nothing_is_made_for_a_resource_whose_deletion_was_missed() -> None:
    world = await settled()
    world.cluster.remove("default", RESOURCE)
    world.watch.list_anew()
    world.watch.children.clear()  # its children's deletions were told
    world.cluster.now += 2.0
    assert await world.look() is None
    assert await world.look() is None
    assert world.cluster.writes == []
    assert world.engines.followed == {}


async def test_a_status_is_not_written_for_an_invalid_resource_that_is_gone() -> None:
    world = World({"accelerator": "none"})
    world.see()
    world.cluster.remove("default", RESOURCE)
    assert await world.look() is None
    assert world.cluster.writes == []


async def test_a_resource_made_anew_in_a_gap_is_the_one_that_counts() -> None:
    world = await settled()
    world.cluster.remove("default", RESOURCE)
    world.cluster.create_resource(KEY, DEMO)
    world.see_after_a_gap()
    for _ in range(6):
        world.cluster.now += 2.0
        world.see_after_a_gap()
        await world.try_to_look()
        world.controllers.settle()
    uid = world.cluster.resource(KEY)["metadata"]["uid"]
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    owners = {
        owner["uid"]
        for _, child in world.children()
        for owner in child["metadata"]["ownerReferences"]
    }
    assert owners == {uid}


async def test_a_child_whose_deletion_was_missed_is_made_again_after_a_roll_call() -> None:
    world = await settled()
    service = Ref("Service", "demo")
    world.cluster.remove("default", service)
    world.see_after_a_gap()
    await world.look()
    assert ("default", service) not in world.cluster.objects
    await world.roll_call.call()
    assert set(world.woken) == {KEY}
    await world.look()
    assert ("default", service) in world.cluster.objects


async def test_a_phantom_pod_does_not_block_a_scale_down() -> None:
    world = await settled()
    pod = world.ready_pods("draft")[0]
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    world.cluster.remove("default", Ref("Pod", pod["metadata"]["name"]))
    for _ in range(4):
        world.see_after_a_gap()
        world.cluster.now += 2.0
        await world.look()
        world.engines.finish()
    await world.roll_call.call()
    for _ in range(6):
        world.cluster.now += 2.0
        world.see_after_a_gap()
        await world.look()
        world.engines.finish()
        world.controllers.settle()
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 1


async def test_a_roll_call_with_everyone_there_changes_nothing() -> None:
    world = await settled()
    before = world.view.children(KEY)
    await world.roll_call.call()
    assert world.woken == []
    assert world.view.children(KEY) == before


async def test_what_is_newer_than_the_list_stays() -> None:
    world = await settled()
    world.cluster.remove("default", Ref("Service", "demo"))
    world.see()
    listed = world.cluster.uids

    async def uids(kind: str, namespace: str) -> frozenset[str]:
        found = await listed(kind, namespace)
        if kind == "Service":  # made and seen while the list is on its way
            await world.look()
            world.see()
        return found

    world.cluster.uids = uids  # type: ignore[method-assign]
    await world.roll_call.call()
    assert Ref("Service", "demo") in world.view.children(KEY)


async def test_a_kind_that_cannot_be_listed_loses_nobody() -> None:
    world = await settled()
    world.cluster.remove("default", Ref("Service", "demo"))
    world.see_after_a_gap()
    world.cluster.failures = [BusyError("503") for _ in WATCHED_KINDS]
    await world.roll_call.call()
    assert Ref("Service", "demo") in world.view.children(KEY)
    await world.roll_call.call()
    assert Ref("Service", "demo") not in world.view.children(KEY)


async def test_only_watched_namespaces_are_listed() -> None:
    world = await settled()
    asked: list[str] = []

    async def uids(kind: str, namespace: str) -> frozenset[str]:
        asked.append(namespace)
        return frozenset()

    world.cluster.uids = uids  # type: ignore[method-assign]
    await RollCall(world.cluster, world.view, world.woken.append, ("one", "two")).call()
    assert set(asked) == {"one", "two"}


async def test_a_watch_that_begins_anew_is_followed_by_a_roll_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roll_call, "SETTLE_SECONDS", 0.0)
    world = await settled()
    world.cluster.remove("default", Ref("Service", "demo"))
    world.see_after_a_gap()
    woken = asyncio.Event()
    calls = RollCall(world.cluster, world.view, lambda key: woken.set())
    running = asyncio.ensure_future(calls.run())
    calls.listed()
    async with asyncio.timeout(30):
        await woken.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_namespace_that_cannot_be_listed_hides_no_gap_in_another() -> None:
    world = await settled()
    ref = Ref("Service", "demo")
    world.cluster.remove("default", ref)
    world.see_after_a_gap()
    world.cluster.shut = {"gone"}
    woken: list[object] = []
    await RollCall(world.cluster, world.view, woken.append, ["gone", "default"]).call()
    assert set(woken) == {KEY}
