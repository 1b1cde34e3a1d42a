"""The object cache follows the cluster, whatever a watch misses; in virtual time."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import kopf
import pytest
from kopf._cogs.structs.references import Resource
from tests.unit.ssd_operator.memory_cluster import MemoryCluster
from tests.unit.ssd_operator.virtual_time import in_virtual_time, pass_by
from tests.unit.ssd_operator.world import DEMO, KEY

from ssd_operator.api.spec import KIND, Object
from ssd_operator.children.objects import KINDS, WATCHED_KINDS
from ssd_operator.observe.cluster import BusyError, ClusterError, ForbiddenError, Key, Ref
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.runtime.watches import (
    LISTS_OF_FORBIDDEN,
    LONGEST_BACK_OFF_SECONDS,
    PERIOD_SECONDS,
    RETRY_SECONDS,
    Lists,
    make_registry,
    watch_settings,
)

FORBIDDEN = ForbiddenError("cannot list it")


@dataclass
class Watched:
    """A cluster, and a cache that watches keep up to date."""

    namespaces: Sequence[str] = ()
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    woken: list[Key] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = ObjectCache(lambda key, **_: self.woken.append(key))
        self.lists = Lists(self.cluster, self.cache, self.namespaces)

    async def follow(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        """List for a time, in which something happens."""
        watching = asyncio.ensure_future(self.lists.run())
        await pass_by(seconds)
        then()
        await pass_by(seconds)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


@in_virtual_time
async def test_what_was_created_and_deleted_during_a_gap_is_found_by_the_next_list() -> None:
    watched = Watched()
    watched.cluster.create_resource(KEY, DEMO)

    def replace_it() -> None:
        assert watched.cache.resources == {KEY}
        watched.cluster.remove(KEY[0], Ref(KIND, KEY[1]))
        watched.cluster.create_resource(("default", "new"), DEMO)
        watched.cluster.log.clear()  # no watch reports it

    await watched.follow(PERIOD_SECONDS, replace_it)
    assert watched.cache.resources == {("default", "new")}
    assert set(watched.woken) == {KEY, ("default", "new")}


@in_virtual_time
async def test_a_kind_that_cannot_be_listed_loses_no_object_and_is_listed_again() -> None:
    watched = Watched()
    watched.cluster.create_resource(KEY, DEMO)

    def fail() -> None:
        watched.cluster.list_faults = {KIND: BusyError("503")}

    await watched.follow(PERIOD_SECONDS, fail)
    assert watched.cache.resources == {KEY}
    watched.cluster.list_faults = {}
    watched.cluster.remove(KEY[0], Ref(KIND, KEY[1]))
    await watched.follow(RETRY_SECONDS)
    assert watched.cache.resources == set()


@in_virtual_time
async def test_an_operator_is_not_ready_until_every_kind_was_listed() -> None:
    watched = Watched(["one"])
    watched.cluster.list_faults = {"NetworkPolicy": ForbiddenError("cannot list NetworkPolicy")}
    assert watched.lists.problem == "starting"
    await watched.follow(10 * RETRY_SECONDS)
    assert "cannot list NetworkPolicy" in watched.lists.problem
    watched.cluster.list_faults = {}
    await watched.follow(RETRY_SECONDS)
    assert watched.lists.problem == ""


@in_virtual_time
async def test_an_error_of_a_list_is_logged_once_until_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched(["one"])
    for error in (FORBIDDEN, FORBIDDEN, BusyError("no answer")):
        watched.cluster.list_faults = {"NetworkPolicy": error}
        await watched.follow(10 * RETRY_SECONDS)
    logged = [each.getMessage() for each in caplog.records if "list_failed" in each.getMessage()]
    assert len(logged) == 2


@pytest.mark.parametrize("answer", [None, FORBIDDEN])
@in_virtual_time
async def test_the_time_without_an_answer_begins_again_with_each_answer(
    answer: ClusterError | None,
) -> None:
    watched = Watched(["one"])
    assert watched.lists.seconds_without_answer() < 0
    watched.cluster.list_faults = {"one": BusyError("no answer")}
    await watched.follow(10 * RETRY_SECONDS)
    assert watched.lists.seconds_without_answer() >= 9 * RETRY_SECONDS
    watched.cluster.list_faults = {"one": answer} if answer else {}
    await watched.follow(RETRY_SECONDS)
    assert watched.lists.seconds_without_answer() <= RETRY_SECONDS


@in_virtual_time
async def test_only_watched_namespaces_are_listed() -> None:
    watched = Watched(["one", "two"])
    watched.cluster.create_resource(KEY, DEMO)
    watched.cluster.list_faults = {"default": FORBIDDEN, "": FORBIDDEN}
    await watched.follow(RETRY_SECONDS)
    assert (watched.lists.problem, watched.cache.resources) == ("", set())


@pytest.mark.parametrize("namespaces", [["default", "gone"], ["gone"]])
@in_virtual_time
async def test_a_namespace_that_stays_forbidden_is_not_waited_for_beside_another(
    namespaces: Sequence[str],
) -> None:
    watched = Watched(namespaces)
    watched.cluster.list_faults = {"gone": FORBIDDEN}

    def check() -> None:
        assert watched.lists.problem, "rights may come a moment late"

    await watched.follow(RETRY_SECONDS * (LISTS_OF_FORBIDDEN - 2), check)
    await watched.follow(RETRY_SECONDS * LISTS_OF_FORBIDDEN)
    assert bool(watched.lists.problem) is (len(namespaces) == 1)


@in_virtual_time
async def test_no_pass_begins_without_a_kind_of_a_namespace_whose_resources_are_listed() -> None:
    watched = Watched(["one", "two"])
    watched.cluster.list_faults = {("Pod", "one"): FORBIDDEN}
    await watched.follow(RETRY_SECONDS * LISTS_OF_FORBIDDEN)
    assert watched.lists.problem == str(FORBIDDEN)


@pytest.mark.parametrize(("event", "is_there"), [(None, True), ("ADDED", True), ("DELETED", False)])
async def test_an_event_of_kopf_is_kept_without_the_record_of_writers(
    event: str | None, *, is_there: bool
) -> None:
    watched = Watched()
    child = service()
    child["metadata"] |= {"managedFields": [{}], "resourceVersion": "7"}
    item = {"metadata": child["metadata"]}
    resource = resource_of("Service")
    (handler,) = [each for each in handlers(watched.cache) if each.selector.check(resource)]
    await handler.fn(event={"type": event, "object": item}, resource=resource)
    found = watched.cache.children(KEY)
    assert list(found) == ([Ref("Service", "demo")] if is_there else [])
    assert all("managedFields" not in each["metadata"] for each in found.values())


async def test_kopf_reads_the_watched_kinds_and_no_other_group_of_apis() -> None:
    resources = {resource_of(kind): kind for kind in KINDS}
    selectors = [each.selector for each in handlers(Watched().cache)]
    selected = [resources[each] for selector in selectors for each in selector.select(resources)]
    assert sorted(selected) == sorted(WATCHED_KINDS)
    # A selector without a group makes kopf read all of them, those that are not available too.
    assert {each.group for each in selectors} == {resource_of(kind).group for kind in WATCHED_KINDS}


def test_kopf_never_gives_up_a_call_that_fails() -> None:
    backoffs = watch_settings().networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    first, second = (list(islice(backoffs, 1000)) for _ in range(2))
    assert first == second == sorted(first)
    assert (len(first), first[-1]) == (1000, LONGEST_BACK_OFF_SECONDS)


def test_kopf_copies_and_stores_nothing_of_an_object() -> None:
    storage = watch_settings().persistence.diffbase_storage
    body, patch = kopf.Body({"metadata": {}, "spec": {"a": 1}}), kopf.Patch()
    assert storage.fetch(body=body) is None
    essence = storage.build(body=body)
    storage.store(body=body, patch=patch, essence=essence)
    assert (essence, patch) == ({}, {})


def handlers(cache: ObjectCache) -> list[Any]:
    return list(make_registry(cache)._watching.get_all_handlers())


def resource_of(kind: str) -> Resource:
    """A kind as kopf discovers it."""
    group, _, version = KINDS[kind].api_version.rpartition("/")
    return Resource(group, version, KINDS[kind].plural, kind=kind, namespaced=True)


def service() -> Object:
    labels = {"ssd.dev/name": KEY[1], "app.kubernetes.io/managed-by": "ssd-operator"}
    metadata = {"namespace": KEY[0], "name": "demo", "labels": labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata}
