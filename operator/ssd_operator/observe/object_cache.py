"""The objects of all resources, as watches and answers to our own writes report them."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from ssd_operator.api.spec import GROUP, KIND, POOL_KIND, RESOURCE_KINDS, Object, prefix_of
from ssd_operator.children.objects import (
    KINDS,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    OPERATOR,
    POOL_LABEL,
    Component,
)
from ssd_operator.observe.cluster import Key, Ref, ref_of
from ssd_operator.observe.pod_state import is_live, is_pod_of, labels_of

LABELS = f"{MANAGED_BY_LABEL}={OPERATOR},!service.kubernetes.io/headless"
"""Selects children and their pods. EndpointSlices carry the labels of their Services; clients use
the Service that is not headless."""


class ObjectCache:
    """What a pass sees of a resource and its children. Asyncio loop.

    The newest version of an object counts, in whatever order reports come. Without the answers to
    our own writes, a pass before the watch brings them would write them again. Without the versions
    of deleted objects, an answer that comes late would bring one back.
    """

    def __init__(self, wake: Callable[..., None]) -> None:
        """``wake`` is called with the key of a resource that is due for a pass.

        ``is_changed`` is true for a new generation of the resource itself and for its deletion:
        neither waits for the retry of a pass that failed before.
        """
        self._wake = wake
        self._objects: dict[str, Object] = {}
        """Live objects by uid."""
        self._users: dict[Key, set[str]] = {}
        """Uids of the resources that refer to a pool and of its live targets, by its key."""
        self._pools: dict[str, set[Key]] = {}
        """The pools of ``_pools_of`` by uid, of the objects that have some."""
        self._uids: dict[Key, set[str]] = {}
        self._deleted: dict[str, int] = {}
        """Last version of each deleted object, by uid."""
        self._lists: dict[tuple[str, str], int] = {}
        """Version of the last list by kind and namespace."""

    @property
    def resources(self) -> set[Key]:
        """All resources."""
        return {key for key in self._uids if self.resource(key) is not None}

    def resource(self, key: Key) -> Object | None:
        """A resource; None if there is none.

        An SSDDeployment older than the kind SSDDraftPool may have a pool's prefix; it has
        precedence.
        """
        things = (thing for thing in self._of(key) if thing["kind"] in RESOURCE_KINDS)
        return max(things, key=lambda thing: (thing["kind"] == KIND, _version(thing)), default=None)

    def children(self, key: Key) -> dict[Ref, Object]:
        """Children and pods that may be a resource's; of two with one name the newer."""
        children = (child for child in self._of(key) if child["kind"] not in RESOURCE_KINDS)
        return {ref_of(child): child for child in sorted(children, key=_version)}

    def peers(self, key: Key) -> set[Key]:
        """The pool that a resource refers to, or all that refer to this pool, live or not."""
        resource = self.resource(key)
        if resource is not None and resource["kind"] == KIND:
            return _pool_of(resource)
        users = {key_of(self._objects[uid]) for uid in self._users.get(key, ())}
        # If two objects have one name, the newer one is the resource.
        return {user for user in users if user and key in _pool_of(self.resource(user) or {})}

    def linked(self, key: Key) -> set[Key]:
        """Peers, and the former pools of a resource, or the resources that have left this pool.

        A target keeps the drafts of the former pool until it is replaced.
        """
        users = {key_of(self._objects[uid]) for uid in self._users.get(key, ())}
        found = set[Key]().union(*(self._pools.get(uid, ()) for uid in self._uids.get(key, ())))
        for user in users:
            resource = None if user is None else self.resource(user)
            # Nothing follows a target without a resource: it would never answer.
            if user is not None and resource is not None and resource["kind"] == KIND:
                found.add(user)
        return found

    def wake(self, key: Key, others: AbstractSet[Key] = frozenset(), **changes: bool) -> None:
        """Wake a resource, those that share drafts with it, and ``others``."""
        self._wake(key, **changes)
        for other in others | self.linked(key):
            self._wake(other)

    def put(self, thing: Object) -> None:
        """Keep an object, unless this version is known or older than what is known."""
        uid, version = _uid(thing), _version(thing)
        before, key = self._objects.get(uid), key_of(thing)
        if version <= max(self._deleted.get(uid, -1), -1 if before is None else _version(before)):
            return
        former_pools = self._pools.get(uid, set())
        if (former := self._drop(uid)) not in (None, key):
            self.wake(former)
        if key is not None:
            self._objects[uid] = thing
            self._uids.setdefault(key, set()).add(uid)
            if pools := _pools_of(thing):
                self._pools[uid] = pools
            for pool in pools:
                self._users.setdefault(pool, set()).add(uid)
            is_known = thing["kind"] in RESOURCE_KINDS and before is not None
            is_changed = is_known and _generation(thing) != _generation(before or {})
            self.wake(key, former_pools, is_changed=is_changed)

    def mark_deleted(self, thing: Object) -> None:
        """Record that an object is gone as of this version; a later version shows it again.

        A child whose label was removed is reported by a watch as deleted, too.
        """
        uid, version = _uid(thing), _version(thing)
        if _version(self._objects.get(uid, thing)) <= version:
            self._remove(uid, version)

    def replace(self, kind: str, namespace: str, things: Sequence[Object], version: int) -> None:
        """Keep a complete list of a kind, in a namespace or, if empty, in all.

        Objects that are not in this version of the list are removed.
        """
        listed = set(map(_uid, things))
        for uid, thing in list(self._objects.items()):
            is_here = thing["kind"] == kind and namespace in ("", thing["metadata"]["namespace"])
            if is_here and uid not in listed and _version(thing) <= version:
                self._remove(uid, version)
        for thing in things:
            self.put(thing)
        # Answers are not older than the list before this one.
        oldest = self._lists.get((kind, namespace), 0)
        self._deleted = {uid: last for uid, last in self._deleted.items() if last >= oldest}
        self._lists[kind, namespace] = version

    def _of(self, key: Key) -> Iterator[Object]:
        return (self._objects[uid] for uid in self._uids.get(key, ()))

    def _remove(self, uid: str, version: int) -> None:
        self._deleted[uid] = max(version, self._deleted.get(uid, -1))
        thing, pools = self._objects.get(uid, {}), self._pools.get(uid, set())
        if (key := self._drop(uid)) is not None:
            self.wake(key, pools, is_changed=thing["kind"] in RESOURCE_KINDS)

    def _drop(self, uid: str) -> Key | None:
        """Drop an object, if it is there; returns the key of its resource."""
        thing = self._objects.pop(uid, None)
        key = None if thing is None else key_of(thing)
        for pool in self._pools.pop(uid, ()):
            self._users[pool].discard(uid)
            if not self._users[pool]:
                del self._users[pool]
        if key is not None:
            self._uids[key].discard(uid)
            if not self._uids[key]:
                del self._uids[key]
        return key


def key_of(thing: Object) -> Key | None:
    """Key of the resource that has a pass when an object changes.

    It is that of its controller, else of its label: pods have a ReplicaSet as controller, and the
    labels of other children may have been removed.
    """
    metadata, name = thing["metadata"], labels_of(thing).get(NAME_LABEL)
    for owner in metadata.get("ownerReferences") or []:
        kind = owner.get("kind")
        if kind in RESOURCE_KINDS and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/"):
            name = prefix_of(kind, owner["name"])
    if thing["kind"] in RESOURCE_KINDS:
        name = prefix_of(thing["kind"], metadata["name"])
    return None if name is None else (metadata["namespace"], name)


def _pool_of(thing: Object) -> set[Key]:
    """Key of the pool that a resource refers to; none for other objects."""
    reference = ((thing.get("spec") or {}).get("draft") or {}).get("poolRef") or {}
    if thing.get("kind") != KIND or "name" not in reference:
        return set()
    return {(thing["metadata"]["namespace"], prefix_of(POOL_KIND, reference["name"]))}


def _pools_of(thing: Object) -> set[Key]:
    """Key of the pool that a resource refers to, or whose label a live target has."""
    pool, name = (labels_of(thing).get(label) for label in (POOL_LABEL, NAME_LABEL))
    if thing["kind"] != "Pod" or not pool:
        return _pool_of(thing)
    is_target = is_live(thing) and is_pod_of(thing, str(name), (Component.TARGET,))
    return {(thing["metadata"]["namespace"], pool)} if is_target else set()


def _uid(thing: Object) -> str:
    return str(thing["metadata"].get("uid", ""))


def _version(thing: Object) -> int:
    """Resource versions are opaque by contract, and numbers in every API server that exists."""
    text = str(thing["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _generation(thing: Object) -> int:
    return int(thing.get("metadata", {}).get("generation", 0))


def whole(kind: str, item: Object) -> Object:
    """An item of a list, which comes without its kind; without ``managedFields``, half its size."""
    item["metadata"].pop("managedFields", None)
    return {**item, "kind": kind, "apiVersion": KINDS[kind].api_version}
