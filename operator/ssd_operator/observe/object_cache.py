"""What the watch has seen of a resource and its children, and what we have just written."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from ssd_operator.api.spec import GROUP, KIND, Object
from ssd_operator.children.names import MANAGED_BY_LABEL, NAME_LABEL, OPERATOR, resource_of_account
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.facts import Ref

ANSWER_SECONDS = 60.0
"""Longest time that an answer stands in for what the watch has yet to bring."""


class ObjectCache:
    """The watch's objects, overlaid with answers to our writes until it catches up. Asyncio loop.

    Without the overlay a pass that comes before its own writes do would write them again. What is
    known to be gone is left out, whatever index or answer still has it: a watch that had a gap
    lists anew and never tells what it missed (tried with kopf 1.45).
    """

    def __init__(
        self,
        resources: Mapping[Key, Iterable[Object]],
        children: Mapping[Key, Iterable[Object]],
        now: Callable[[], float],
    ) -> None:
        """Read two indices, which the watch keeps: by key, and by ``owner_key``."""
        self._resources = resources
        self._children = children
        self._now = now
        self._answers: dict[Key, dict[Ref, tuple[Object, float]]] = {}
        self._gone: dict[str, tuple[int, float]] = {}
        """By uid: the last version that was there, and when its end was told."""
        self._generations: dict[Key, int] = {}

    def resource(self, key: Key) -> Object | None:
        """A resource; None if there is none."""
        found = _newest(self._present(self._resources.get(key, ())))
        if found is None:
            return None
        answer = self._answers_of(key).get(Ref(KIND, key[1]), found)
        return answer if _uid(answer) == _uid(found) and _is_newer(answer, found) else found

    def children(self, key: Key) -> dict[Ref, Object]:
        """Children and pods that may be a resource's."""
        found: dict[Ref, Object] = {}
        answers = {ref: each for ref, each in self._answers_of(key).items() if ref.kind != KIND}
        for each in (*self._present(self._children.get(key, ())), *answers.values()):
            ref = Ref(each["kind"], each["metadata"]["name"])
            if ref not in found or _is_newer(each, found[ref]):
                found[ref] = each
        return found

    def everything(self) -> list[Object]:
        """All that the watch has brought of all resources and is not known to be gone."""
        indexed = chain(self._resources.values(), self._children.values())
        return list(self._present(chain.from_iterable(indexed)))

    def remember(self, key: Key, answer: Object) -> None:
        """Keep what the API server answered to a write, until the watch brings it or too long."""
        ref = Ref(answer["kind"], answer["metadata"]["name"])
        self._answers.setdefault(key, {})[ref] = answer, self._now()

    def saw(self, key: Key, thing: Object, *, is_deleted: bool = False) -> bool:
        """The watch brought an object: forget an answer that is not newer.

        Returns:
            Whether it is the resource itself, and what is asked of us has changed.
        """
        if is_deleted:
            self.bury(thing)
        ref = Ref(thing["kind"], thing["metadata"]["name"])
        answers = self._answers.get(key, {})
        if ref in answers and not _is_newer(answers[ref][0], thing):
            del answers[ref]
        return ref.kind == KIND and self._is_changed(key, thing)

    def bury(self, thing: Object) -> None:
        """An object is gone as of this version; it may come back with a later one.

        So does a child whose label was stripped, which a watch tells as a deletion.
        """
        self._gone[_uid(thing)] = _version(thing), self._now()

    def tidy(self) -> None:
        """Forget the dead that no index has and no answer can bring back any more."""
        oldest = self._now() - ANSWER_SECONDS
        indexed = chain(self._resources.values(), self._children.values())
        kept = {_uid(thing) for thing in chain.from_iterable(indexed)}
        self._gone = {
            uid: (version, at)
            for uid, (version, at) in self._gone.items()
            if uid in kept or at >= oldest
        }

    def forget(self, key: Key) -> None:
        """A resource is gone."""
        self._answers.pop(key, None)
        self._generations.pop(key, None)

    def _is_changed(self, key: Key, resource: Object) -> bool:
        before, now = self._generations.get(key), int(resource["metadata"]["generation"])
        self._generations[key] = now
        return before is not None and before != now

    def _answers_of(self, key: Key) -> dict[Ref, Object]:
        oldest = self._now() - ANSWER_SECONDS
        return {
            ref: answer
            for ref, (answer, at) in self._answers.get(key, {}).items()
            if at >= oldest and not self._is_gone(answer)
        }

    def _present(self, things: Iterable[Object]) -> Iterable[Object]:
        return (thing for thing in things if not self._is_gone(thing))

    def _is_gone(self, thing: Object) -> bool:
        last = self._gone.get(_uid(thing))
        return last is not None and _version(thing) <= last[0]


def key_of(thing: Object) -> Key | None:
    """Key of the resource that is to be looked at for an object's sake."""
    if thing["kind"] == KIND:
        return thing["metadata"]["namespace"], thing["metadata"]["name"]
    return owner_key(thing)


def owner_key(thing: Object) -> Key | None:
    """Key of the resource that an object belongs to, by its controller, else by its label.

    Pods have a ReplicaSet as controller, and their account shows whose they are when labels were
    changed; of other children a label may have been stripped.
    """
    metadata = thing["metadata"]
    for owner in metadata.get("ownerReferences") or []:
        if owner.get("kind") == KIND and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/"):
            return metadata["namespace"], owner["name"]
    account = thing.get("spec", {}).get("serviceAccountName", "") if thing["kind"] == "Pod" else ""
    name = resource_of_account(account) or (metadata.get("labels") or {}).get(NAME_LABEL)
    return None if name is None else (metadata["namespace"], name)


def is_ours(thing: Object, uid: str) -> bool:
    """Whether an object is a resource's child: it controls it, or we made it and nobody does."""
    metadata = thing["metadata"]
    controller = controller_of(thing)
    if controller is not None:
        return controller.get("uid") == uid
    return (metadata.get("labels") or {}).get(MANAGED_BY_LABEL) == OPERATOR


def is_of_former(thing: Object, name: str, uid: str) -> bool:
    """Whether an object's controller was a resource of the same name that is gone."""
    controller = controller_of(thing)
    return (
        controller is not None
        and controller.get("kind") == KIND
        and controller.get("name") == name
        and controller.get("uid") != uid
    )


def controller_of(thing: Object) -> Object | None:
    """The owner reference that controls an object."""
    owners = thing["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), None)


def _uid(thing: Object) -> str:
    return str(thing["metadata"].get("uid", ""))


def _newest(things: Iterable[Object]) -> Object | None:
    return max(things, key=_version, default=None)


def _is_newer(one: Object, other: Object) -> bool:
    return _version(one) > _version(other)


def _version(thing: Object) -> int:
    """Resource versions are opaque by contract and numbers in every API server there is."""
    text = str(thing["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
