"""What a pass sees: the watch, our own answers, and nothing that is known to be gone."""

from dataclasses import dataclass, field

from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.object_cache import ANSWER_SECONDS, ObjectCache

KEY: Key = ("default", "demo")
POD = Ref("Pod", "demo-draft-0-a")


def pod(version: int, uid: str = "uid-1") -> Object:
    metadata = {"name": POD.name, "namespace": "default", "uid": uid, "labels": {}}
    return {"kind": "Pod", "metadata": {**metadata, "resourceVersion": str(version)}}


@dataclass
class Seen:
    """A view over an index that a test fills."""

    children: dict[Key, list[Object]] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.view = ObjectCache({}, self.children, lambda: self.now)

    def version(self) -> str | None:
        found = self.view.children(KEY).get(POD)
        return None if found is None else str(found["metadata"]["resourceVersion"])


def test_an_answer_stands_in_until_the_watch_has_caught_up() -> None:
    seen = Seen({KEY: [pod(1)]})
    seen.view.remember(KEY, pod(2))
    assert seen.version() == "2"
    seen.children[KEY] = [pod(3)]
    seen.view.saw(KEY, pod(3))
    assert seen.version() == "3"


def test_an_answer_that_comes_after_the_deletion_is_not_believed() -> None:
    seen = Seen()
    seen.view.saw(KEY, pod(3), is_deleted=True)
    seen.view.remember(KEY, pod(2))
    assert seen.version() is None


def test_an_answer_that_nothing_confirms_is_forgotten_in_the_end() -> None:
    seen = Seen()
    seen.view.remember(KEY, pod(2))
    seen.now += ANSWER_SECONDS
    assert seen.version() == "2"
    seen.now += 1.0
    assert seen.version() is None


def test_an_object_whose_label_was_stripped_and_put_back_is_seen_again() -> None:
    seen = Seen()
    seen.view.saw(KEY, pod(3), is_deleted=True)
    seen.children[KEY] = [pod(4)]
    assert seen.version() == "4"


def test_of_two_objects_of_one_name_the_newer_counts() -> None:
    seen = Seen({KEY: [pod(5, "uid-2"), pod(1)]})
    assert seen.version() == "5"


def test_the_dead_are_remembered_while_an_index_has_them() -> None:
    seen = Seen({KEY: [pod(1)]})
    seen.view.bury(pod(1))
    seen.now += 10 * ANSWER_SECONDS
    seen.view.tidy()
    assert seen.version() is None
    seen.children.clear()
    seen.view.tidy()
    seen.children[KEY] = [pod(1)]
    assert seen.version() == "1"


def test_only_a_new_generation_of_the_resource_is_a_change() -> None:
    view = Seen().view
    assert not view.saw(KEY, resource(1))
    assert not view.saw(KEY, resource(1))
    assert not view.saw(KEY, pod(9))
    assert view.saw(KEY, resource(2))


def resource(generation: int) -> Object:
    metadata = {"namespace": "default", "name": "demo", "uid": "uid-0", "generation": generation}
    return {"kind": KIND, "metadata": metadata}
