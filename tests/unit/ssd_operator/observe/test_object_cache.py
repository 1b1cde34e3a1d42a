"""What a pass sees: the newest version of each object, and none that was deleted."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import Key, Ref
from ssd_operator.observe.object_cache import ObjectCache

KEY: Key = ("default", "demo")
OTHER: Key = ("default", "other")
POD = Ref("Pod", "demo-draft-0-a")


def pod(version: int, uid: str = "uid-1", name: str = "demo") -> Object:
    metadata = {"name": POD.name, "namespace": "default", "uid": uid}
    labels = {"ssd.dev/name": name}
    return {"kind": "Pod", "metadata": {**metadata, "labels": labels, "resourceVersion": version}}


def resource(version: int, generation: int) -> Object:
    metadata = {"name": "demo", "namespace": "default", "uid": "uid-2", "generation": generation}
    return {"kind": KIND, "metadata": {**metadata, "resourceVersion": version}}


@dataclass
class Seen:
    """A cache and the resources that it has woken."""

    woken: list[tuple[Key, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = ObjectCache(self.wake)

    def wake(self, key: Key, *, is_changed: bool = False) -> None:
        self.woken.append((key, is_changed))

    def version(self, key: Key = KEY) -> int | None:
        found = self.cache.children(key).get(POD)
        return None if found is None else int(found["metadata"]["resourceVersion"])


PUT, DELETED = ObjectCache.put, ObjectCache.mark_deleted


@pytest.mark.parametrize(
    ("reports", "version"),
    [
        ([(PUT, 1), (PUT, 3), (PUT, 2)], 3),
        ([(PUT, 1), (PUT, 3), (PUT, 2), (PUT, 4)], 4),
        ([(DELETED, 3), (PUT, 2)], None),
        ([(DELETED, 3), (PUT, 4), (DELETED, 3)], 4),
        ([(PUT, 100), (DELETED, 120), (DELETED, 100), (PUT, 110)], None),
    ],
    ids=[
        "an answer counts",
        "until the watch brings a newer version",
        "an answer comes after the deletion",
        "a label was removed and restored",
        "the answer to a deletion is older than the event of the watch",
    ],
)
def test_the_newest_report_counts(
    reports: list[tuple[Callable[[ObjectCache, Object], None], int]], version: int | None
) -> None:
    seen = Seen()
    for report, number in reports:
        report(seen.cache, pod(number))
    assert seen.version() == version


def test_of_two_objects_of_one_name_the_newer_counts() -> None:
    seen = Seen()
    seen.cache.put(pod(5, "uid-2"))
    seen.cache.put(pod(1))
    assert seen.version() == 5
    seen.cache.mark_deleted(pod(6, "uid-1"))
    assert seen.version() == 5


def test_an_object_that_another_resource_took_over_is_not_ours_any_more() -> None:
    seen = Seen()
    seen.cache.put(pod(2))
    seen.cache.put(pod(3, name="other"))
    assert (seen.version(), seen.version(OTHER)) == (None, 3)
    assert seen.woken == [(KEY, False), (KEY, False), (OTHER, False)]


def test_what_a_list_does_not_have_is_gone_unless_it_is_newer() -> None:
    seen = Seen()
    seen.cache.put(pod(3))
    seen.cache.replace("Service", "", (), 9)
    seen.cache.replace("Pod", "elsewhere", (), 9)
    seen.cache.replace("Pod", "", (), 2)
    assert seen.version() == 3
    seen.cache.replace("Pod", "default", (), 4)
    assert seen.version() is None
    seen.cache.put(pod(4))
    assert seen.version() is None, "the list is as new as this answer"


def test_a_list_of_what_is_known_wakes_nothing() -> None:
    seen = Seen()
    seen.cache.replace("Pod", "", [pod(3)], 4)
    assert seen.woken == [(KEY, False)]
    seen.cache.replace("Pod", "", [pod(3)], 5)
    assert seen.woken == [(KEY, False)]


@pytest.mark.parametrize(
    ("generation", "is_changed"), [(1, False), (2, True)], ids=["status", "spec"]
)
def test_only_a_new_generation_of_a_resource_is_a_change(
    generation: int, *, is_changed: bool
) -> None:
    seen = Seen()
    seen.cache.put(resource(1, 1))
    seen.cache.put(resource(2, generation))
    assert seen.woken == [(KEY, False), (KEY, is_changed)]


def test_a_resource_made_again_under_its_name_is_no_change_and_the_newer_counts() -> None:
    seen = Seen()
    seen.cache.put(resource(1, 1))
    again = resource(3, 2)
    again["metadata"]["uid"] = "uid-3"
    seen.cache.put(again)
    assert seen.cache.resource(KEY) == again
    assert seen.woken == [(KEY, False)] * 2


def test_the_deletion_of_a_resource_ends_the_back_off_of_its_name() -> None:
    seen = Seen()
    seen.cache.put(resource(1, 1))
    seen.cache.mark_deleted(resource(2, 1))
    assert seen.woken == [(KEY, False), (KEY, True)]


def user(version: int, pool: str, name: str = "demo", uid: str = "uid-2") -> Object:
    """An SSDDeployment that refers to a pool."""
    metadata = {"name": name, "namespace": "default", "uid": uid, "resourceVersion": version}
    return {"kind": KIND, "metadata": metadata, "spec": {"draft": {"poolRef": {"name": pool}}}}


def test_the_users_of_a_pool_follow_references_and_deletions() -> None:
    cache, (first, second) = Seen().cache, (("default", f"{name}-pool") for name in "ab")
    cache.put(user(1, "a"))
    cache.put(user(2, "a", "other", "uid-3"))
    assert cache.peers(first) == {KEY, OTHER}
    cache.put(user(3, "b"))
    assert (cache.peers(first), cache.peers(second)) == ({OTHER}, {KEY})
    # A new resource of the name, before the deletion of the former one is reported.
    cache.put(user(5, "a", uid="uid-4"))
    assert (cache.peers(first), cache.peers(second)) == ({KEY, OTHER}, set())
    cache.mark_deleted(user(4, "b"))
    cache.mark_deleted(user(6, "a", "other", "uid-3"))
    assert (cache.peers(first), cache.peers(second)) == ({KEY}, set())
    assert cache.peers(KEY) == {first}
    cache.replace(KIND, "default", [], 7)
    assert not cache.peers(first)


def pooled(version: int, pool: str, *, is_live: bool = True) -> Object:
    """A target with the drafts of a pool."""
    made = pod(version)
    owner = {"kind": "ReplicaSet", "name": "demo-target-0-h", "controller": True}
    labels = {"ssd.dev/pool": pool, "ssd.dev/component": "target", "ssd.dev/cell": "0"}
    made["metadata"]["labels"] |= labels | {"pod-template-hash": "h"}
    made["metadata"]["ownerReferences"] = [owner]
    return made | {"status": {"phase": "Running" if is_live else "Succeeded"}}


def test_a_target_links_its_resource_to_the_former_pool_until_it_is_replaced() -> None:
    seen, (first, second) = Seen(), (("default", f"{name}-pool") for name in "ab")
    cache = seen.cache
    cache.put(pooled(1, "a-pool"))
    assert not cache.linked(first), "nothing follows a target without a resource"
    cache.put(user(2, "a"))
    cache.put(user(3, "b"))
    assert (cache.linked(first), cache.peers(first)) == ({KEY}, set())
    assert (cache.linked(KEY), cache.peers(KEY)) == ({first, second}, {second})
    seen.woken.clear()
    cache.wake(KEY)
    assert {key for key, _ in seen.woken} == {KEY, first, second}
    seen.woken.clear()
    cache.put(pooled(4, "a-pool", is_live=False))
    assert {key for key, _ in seen.woken} == {KEY, first, second}
    assert (cache.linked(first), cache.linked(second)) == (set(), {KEY})
    cache.put(pooled(5, "a-pool"))
    cache.mark_deleted(pooled(6, "a-pool"))
    assert (cache.linked(first), cache.linked(KEY)) == (set(), {second})


@pytest.mark.parametrize(
    "changes",
    [
        {"ownerReferences": []},
        {"labels": {"ssd.dev/name": "demo", "ssd.dev/pool": "a-pool"}},
    ],
)
def test_only_a_pod_of_a_deployment_of_targets_links_its_resource_to_a_pool(
    changes: Object,
) -> None:
    cache, made = Seen().cache, pooled(2, "a-pool")
    cache.put(user(1, "b"))
    cache.put(made | {"metadata": made["metadata"] | changes})
    assert not cache.linked(("default", "a-pool"))
