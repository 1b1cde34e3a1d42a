"""What a pass sees: the indices, answers to our own calls, and no object that was deleted."""

from dataclasses import dataclass, field

from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import Key, Ref
from ssd_operator.observe.object_cache import ANSWER_SECONDS, ObjectCache

KEY: Key = ("default", "demo")
POD = Ref("Pod", "demo-draft-0-a")


def pod(version: int, uid: str = "uid-1") -> Object:
    metadata = {"name": POD.name, "namespace": "default", "uid": uid, "labels": {}}
    return {"kind": "Pod", "metadata": {**metadata, "resourceVersion": str(version)}}


@dataclass
class Seen:
    """A cache over an index that a test fills."""

    children: dict[Key, list[Object]] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.cache = ObjectCache({}, self.children, lambda: self.now)

    def version(self) -> str | None:
        found = self.cache.children(KEY).get(POD)
        return None if found is None else str(found["metadata"]["resourceVersion"])


def test_an_answer_stands_in_until_the_watch_has_caught_up() -> None:
    seen = Seen({KEY: [pod(1)]})
    seen.cache.remember(KEY, pod(2))
    assert seen.version() == "2"
    seen.children[KEY] = [pod(3)]
    assert seen.version() == "3"


def test_an_answer_that_comes_after_the_deletion_is_ignored() -> None:
    seen = Seen()
    seen.cache.mark_deleted(pod(3))
    seen.cache.remember(KEY, pod(2))
    assert seen.version() is None


def test_an_answer_that_the_watch_does_not_confirm_expires() -> None:
    seen = Seen()
    seen.cache.remember(KEY, pod(2))
    seen.now += ANSWER_SECONDS
    assert seen.version() == "2"
    seen.now += 1.0
    assert seen.version() is None


def test_an_object_whose_label_was_removed_and_restored_is_seen_again() -> None:
    seen = Seen()
    seen.cache.mark_deleted(pod(3))
    seen.children[KEY] = [pod(4)]
    assert seen.version() == "4"


def test_of_two_objects_of_one_name_the_newer_counts() -> None:
    seen = Seen({KEY: [pod(5, "uid-2"), pod(1)]})
    assert seen.version() == "5"


def test_a_deletion_is_remembered_while_an_index_has_the_object() -> None:
    seen = Seen({KEY: [pod(1)]})
    seen.cache.mark_deleted(pod(1))
    seen.now += 10 * ANSWER_SECONDS
    seen.cache.tidy()
    assert seen.version() is None
    seen.children.clear()
    seen.cache.tidy()
    seen.children[KEY] = [pod(1)]
    assert seen.version() == "1"


def test_a_deletion_does_not_hide_the_object_that_took_the_name() -> None:
    seen = Seen()
    seen.cache.remember(KEY, pod(9, "uid-2"))
    seen.cache.mark_deleted(pod(8))
    assert seen.version() == "9"


def test_an_object_that_another_resource_took_over_is_not_ours_any_more() -> None:
    seen = Seen()
    seen.cache.remember(KEY, pod(2))
    seen.cache.replace_answers(pod(2))
    assert seen.version() == "2", "it is our own write"
    seen.cache.replace_answers(pod(3))
    assert seen.version() is None
