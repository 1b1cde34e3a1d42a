"""What the watch has seen of a resource and its children, and what we have just written."""

from collections import deque
from collections.abc import Iterable, Mapping

from ssd_operator.cluster import Key
from ssd_operator.facts import Ref
from ssd_operator.names import MANAGED_BY_LABEL, NAME_LABEL, OPERATOR
from ssd_operator.spec import GROUP, KIND, Object

MOST_GONE = 1024
"""Objects whose end is remembered: more than can end while one call is answered."""


class View:
    """The watch's objects, overlaid with answers to our writes until it catches up. Asyncio loop.

    Without the overlay a pass that comes before its own writes do would write them again.
    """

    def __init__(
        self,
        resources: Mapping[Key, Iterable[Object]],
        children: Mapping[Key, Iterable[Object]],
    ) -> None:
        """Read two indices, which the watch keeps: by key, and by ``owner_key``."""
        self._resources = resources
        self._children = children
        self._answers: dict[Key, dict[Ref, Object]] = {}
        self._gone: deque[str] = deque(maxlen=MOST_GONE)

    def resource(self, key: Key) -> Object | None:
        """A resource; None if there is none."""
        for found in self._resources.get(key, ()):
            answer = self._answers.get(key, {}).get(Ref(KIND, key[1]))
            is_same = answer is not None and _uid(answer) == _uid(found)
            return answer if answer is not None and is_same and _is_newer(answer, found) else found
        return None

    def children(self, key: Key) -> dict[Ref, Object]:
        """Children and pods that may be a resource's."""
        found = {Ref(each["kind"], each["metadata"]["name"]): each for each in self._of(key)}
        for ref, answer in self._answers.get(key, {}).items():
            if ref.kind != KIND and (ref not in found or _is_newer(answer, found[ref])):
                found[ref] = answer
        return found

    def remember(self, key: Key, answer: Object) -> None:
        """Keep what the API server answered to a write.

        An answer may come after the news that its object is gone; it would stay for ever.
        """
        if _uid(answer) in self._gone:
            return
        ref = Ref(answer["kind"], answer["metadata"]["name"])
        self._answers.setdefault(key, {})[ref] = answer

    def saw(self, key: Key, thing: Object, *, is_deleted: bool = False) -> None:
        """The watch brought an object: forget an answer that is not newer."""
        ref = Ref(thing["kind"], thing["metadata"]["name"])
        if is_deleted:
            self._gone.append(_uid(thing))
        elif _uid(thing) in self._gone:  # it only lost our label for a while
            self._gone.remove(_uid(thing))
        answers = self._answers.get(key, {})
        if ref in answers and not _is_newer(answers[ref], thing):
            del answers[ref]

    def forget(self, key: Key) -> None:
        """A resource is gone."""
        self._answers.pop(key, None)

    def _of(self, key: Key) -> Iterable[Object]:
        return self._children.get(key, ())


def owner_key(thing: Object) -> Key | None:
    """Key of the resource that an object belongs to, by its controller, else by its label.

    Pods have a ReplicaSet as controller; of other children a label may have been stripped.
    """
    metadata = thing["metadata"]
    for owner in metadata.get("ownerReferences") or []:
        if owner.get("kind") == KIND and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/"):
            return metadata["namespace"], owner["name"]
    name = (metadata.get("labels") or {}).get(NAME_LABEL)
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


def _is_newer(one: Object, other: Object) -> bool:
    return _version(one) > _version(other)


def _version(thing: Object) -> int:
    """Resource versions are opaque by contract and numbers in every API server there is."""
    text = str(thing["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
