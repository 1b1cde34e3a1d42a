"""The objects of resources: kopf's indices, newer answers to our own writes, deletions."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain

from ssd_operator.api.spec import GROUP, KIND, Object
from ssd_operator.children.names import (
    MANAGED_BY_LABEL,
    NAME_LABEL,
    OPERATOR,
    controller_of,
    resource_of_account,
)
from ssd_operator.children.objects import REQUIRED_KINDS
from ssd_operator.observe.cluster import Key, Ref, is_owned_by, ref_of

ANSWER_SECONDS = 60.0
"""Longest time that an answer stands in for what the watch has yet to bring."""


class ObjectCache:
    """What a pass sees of a resource and its children. Asyncio loop.

    Without the answers, a pass before the watch brings its own writes would write them again.

    *Decision*: deletions are recorded beside the indices, which a relist compares with what exists.
    *Because* a watch that had a gap lists again and never reports what was deleted meanwhile (tried
    with kopf 1.45), and an object that does not exist is costly: a pod is waited for, a Service is
    not made again. *Not chosen*: reading each object by name in each pass. *Revisit when* kopf
    removes from its indices what a new list does not have.
    """

    def __init__(
        self,
        resources: Mapping[Key, Iterable[Object]],
        children: Mapping[Key, Iterable[Object]],
        now: Callable[[], float],
        kinds: AbstractSet[str] = REQUIRED_KINDS,
    ) -> None:
        """Read two indices of these kinds, which kopf keeps: by key, and by ``owner_key``."""
        self.kinds = kinds
        self._resources = resources
        self._children = children
        self._now = now
        self._answers: dict[Key, dict[Ref, tuple[Object, float]]] = {}
        self._deleted: dict[str, tuple[int, float]] = {}
        """By uid: the last version that existed, and when its end was recorded."""

    def resource(self, key: Key) -> Object | None:
        """A resource; None if there is none."""
        indexed = max(self._present(self._resources.get(key, ())), key=_version, default=None)
        answer = self._answers_of(key).get(Ref(KIND, key[1]))
        if indexed is None or answer is None or _uid(answer) != _uid(indexed):
            return indexed
        return max(indexed, answer, key=_version)

    def children(self, key: Key) -> dict[Ref, Object]:
        """Children and pods that may be a resource's."""
        answers = [each for ref, each in self._answers_of(key).items() if ref.kind != KIND]
        things = [*self._present(self._children.get(key, ())), *answers]
        return {ref_of(each): each for each in sorted(things, key=_version)}

    def remember(self, key: Key, answer: Object) -> None:
        """Keep what the API server answered to a write or a read."""
        self._answers.setdefault(key, {})[ref_of(answer)] = answer, self._now()

    def replace_answers(self, thing: Object) -> None:
        """Drop older answers about an object that the watch has brought.

        The object may belong to another resource by now: two resources can want the same name.
        """
        namespace, ref = thing["metadata"]["namespace"], ref_of(thing)
        for key, answers in self._answers.items():
            if key[0] == namespace and ref in answers:
                answer, _ = answers[ref]
                if _version(answer) < _version(thing):
                    del answers[ref]

    def mark_deleted(self, thing: Object) -> None:
        """Record that an object is gone as of this version; a later version shows it again.

        A child whose label was removed is reported by a watch as deleted, too.
        """
        self._deleted[_uid(thing)] = _version(thing), self._now()

    def drop(self, key: Key) -> None:
        """Drop the answers about a resource that is gone."""
        self._answers.pop(key, None)

    def objects(self, kind: str, namespace: str) -> list[Object]:
        """Indexed objects of a kind in a namespace or, if empty, in all."""
        return [
            thing
            for thing in self._present(self._indexed())
            if thing["kind"] == kind and namespace in ("", thing["metadata"]["namespace"])
        ]

    def tidy(self) -> None:
        """Drop deletions that no index and no answer can contradict any more."""
        oldest = self._now() - ANSWER_SECONDS
        kept = set(map(_uid, self._indexed()))
        self._deleted = {
            uid: (version, at)
            for uid, (version, at) in self._deleted.items()
            if uid in kept or at >= oldest
        }

    def _indexed(self) -> Iterator[Object]:
        return chain.from_iterable(chain(self._resources.values(), self._children.values()))

    def _answers_of(self, key: Key) -> dict[Ref, Object]:
        oldest = self._now() - ANSWER_SECONDS
        return {
            ref: answer
            for ref, (answer, at) in self._answers.get(key, {}).items()
            if at >= oldest and not self._is_deleted(answer)
        }

    def _present(self, things: Iterable[Object]) -> Iterator[Object]:
        return (thing for thing in things if not self._is_deleted(thing))

    def _is_deleted(self, thing: Object) -> bool:
        last = self._deleted.get(_uid(thing))
        return last is not None and _version(thing) <= last[0]


def key_of(thing: Object) -> Key | None:
    """Key of the resource that has a pass when an object changes."""
    if thing["kind"] == KIND:
        return thing["metadata"]["namespace"], thing["metadata"]["name"]
    return owner_key(thing)


def owner_key(thing: Object) -> Key | None:
    """Key of the resource that an object belongs to, by its controller, else by its label.

    Pods have a ReplicaSet as controller, and their account shows whose they are when labels were
    changed. Labels of other children may have been removed.
    """
    metadata = thing["metadata"]
    for owner in metadata.get("ownerReferences") or []:
        if owner.get("kind") == KIND and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/"):
            return metadata["namespace"], owner["name"]
    account = thing.get("spec", {}).get("serviceAccountName", "") if thing["kind"] == "Pod" else ""
    name = resource_of_account(account) or (metadata.get("labels") or {}).get(NAME_LABEL)
    return None if name is None else (metadata["namespace"], name)


def is_ours(thing: Object, uid: str) -> bool:
    """Whether an object is a child: controlled by the resource, or ours without a controller."""
    if controller_of(thing):
        return is_owned_by(thing, uid)
    return (thing["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == OPERATOR


def is_of_former(thing: Object, name: str, uid: str) -> bool:
    """Whether an object's controller was a resource of the same name that is gone."""
    controller = controller_of(thing)
    is_namesake = (controller.get("kind"), controller.get("name")) == (KIND, name)
    return is_namesake and controller.get("uid") != uid


def _uid(thing: Object) -> str:
    return str(thing["metadata"].get("uid", ""))


def _version(thing: Object) -> int:
    """Resource versions are opaque by contract, and numbers in every API server that exists."""
    text = str(thing["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
